"""What the CPU platform mends in torch, and how weights get from one process to another there."""

import pytest
import torch

from rollout.verl_plugin.cpu.checkpoint_engine import TCPStoreCheckpointEngine
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


async def test_weights_arrive_through_the_store_as_they_were_update_after_update():
    sender, receiver = (TCPStoreCheckpointEngine(1 << 20, is_master=master) for master in (True, False))
    own, others = TCPStoreCheckpointEngine.build_topology(1, 1, [sender.prepare(), receiver.prepare()])
    sender.init_process_group(own["address"][0])
    receiver.init_process_group(others["address"][0])
    for update in range(2):
        weights = {"a": torch.arange(6.0).reshape(2, 3).T + update, "b": torch.ones(2, dtype=torch.bfloat16)}
        await sender.send_weights(iter(weights.items()))
        received = dict(receiver.receive_weights())
        assert received.keys() == weights.keys()
        assert all(received[name].dtype == weights[name].dtype for name in weights)
        assert all(torch.equal(received[name], weights[name]) for name in weights)
        sender.finalize()
        receiver.finalize()
