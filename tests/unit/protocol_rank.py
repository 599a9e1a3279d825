"""A rank of the switch protocol as the real `run_switch`, one call at a time.

Between two calls of its steps it is deterministic, so the answers that it has got say all about it: to take it one call
further, it runs again from its start on those answers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from moebius_engine.layout import Layout
from moebius_engine.transfer.base import Corrupted

REFUSING = ("prepare", "verify")  # steps that may answer with a reason
MOVING = ("move_weights", "move_kv", "roll_back")
MODELLED = {"settle", "share", "finish", "commit", "abandon", "agree", *REFUSING, *MOVING}


class Call(NamedTuple):
    """What a rank does next: a step by its name, "agree", or "decode" when run_switch has returned."""

    name: str
    argument: Any = None  # the target; the reason told to the others; or why the switch was refused


class Failure(NamedTuple):
    """Answer of a call that raises."""

    text: str


class Bad(NamedTuple):
    """Answer of a move that raises Corrupted."""

    text: str


class _Pause(BaseException):
    """Carries the next call. No Exception: the protocol must not take it for a failure."""


class _StepFailed(Exception):
    pass


class _Recorded:
    """Steps, and agree, that give the recorded answers and stop the rank at the first call without one."""

    def __init__(self, answers: tuple[Any, ...]):
        self._answers = iter(answers)

    def __getattr__(self, name: str) -> Callable:
        if name not in MODELLED:
            raise AttributeError(f"step {name} is not modelled")
        return functools.partial(self._call, name)

    def _call(self, name: str, argument: Any = None) -> Any:
        for answer in self._answers:
            if isinstance(answer, Failure):
                raise _StepFailed(answer.text)
            if isinstance(answer, Bad):
                raise Corrupted(answer.text)
            return {} if name == "finish" else answer
        raise _Pause(Call(name, argument))


@functools.cache
def next_call(protocol: Callable, target: Layout, with_weights: bool, answers: tuple[Any, ...]) -> Call:
    rank = _Recorded(answers)
    try:
        outcome = protocol(rank, rank.agree, target, with_weights=with_weights, clock=lambda: 0.0)
    except _Pause as pause:
        return pause.args[0]
    except (_StepFailed, Corrupted) as error:
        return Call("failed", str(error))
    return Call("decode", outcome.refused)
