"""What the CPU platform mends in torch."""

import pytest

from rollout.verl_plugin.cpu.table import share_by_name

TIMED_OUT = "Shared memory manager connection has timed out"


def failing(*messages: str):
    """A function that raises these, one a call, and then gives its arguments back."""
    left = list(messages)

    def upstream(*arguments):
        if left:
            raise RuntimeError(left.pop(0))
        return arguments

    return upstream


def test_shared_memory_is_asked_for_again_after_a_timeout():
    assert share_by_name(failing(TIMED_OUT, TIMED_OUT), "storage", 1) == ("storage", 1)


@pytest.mark.parametrize("messages", [["no space left"], [TIMED_OUT] * 20])
def test_another_failure_and_too_many_timeouts_are_raised(messages):
    with pytest.raises(RuntimeError, match=messages[0]):
        share_by_name(failing(*messages), "storage")
