"""The protocol of a switch: the order of its steps, what a refusal leaves untouched, and how a fault is undone."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.layout import Layout
from moebius_engine.switch.coordinator import Outcome, run_switch
from moebius_engine.transfer.base import Corrupted

TOGETHER = ("settle", "move_weights", "share", "move_kv", "finish", "verify", "commit")  # prepare a rank does alone


class RecordingSteps:
    """Steps of one rank that only write down what was called. prepare_says, verify_says: its reasons against."""

    def __init__(self, prepare_says: str | None = None, verify_says: str | None = None):
        self.calls: list[str] = []
        self._prepare_says, self._verify_says = prepare_says, verify_says

    def settle(self) -> None:
        self.calls.append("settle")

    def share(self, target: Layout) -> None:
        self.calls.append(f"share {target}")

    def move_weights(self, target: Layout) -> int:
        self.calls.append("move_weights")
        return 900

    def prepare(self) -> str | None:
        self.calls.append("prepare")
        return self._prepare_says

    def move_kv(self) -> int:
        self.calls.append("move_kv")
        return 70

    def finish(self) -> dict[str, float]:
        self.calls.append("finish")
        return {"weights": 3.0, "kv": 2.0}

    def verify(self) -> str | None:
        self.calls.append("verify")
        return self._verify_says

    def roll_back(self) -> None:
        self.calls.append("roll_back")

    def commit(self) -> None:
        self.calls.append("commit")

    def abandon(self) -> None:
        self.calls.append("abandon")

    def break_at(self, step: str, error: Exception) -> None:
        """The step is written down, and raises."""

        def fail(*_):
            self.calls.append(step)
            raise error

        setattr(self, step, fail)


def alone(reason: str | None) -> str | None:
    """Agreement of a single rank."""
    return reason


def steps_to(target: Layout, last: str) -> list[str]:
    steps = ["settle", "move_weights", f"share {target}", "prepare", "move_kv", "finish", "verify"]
    return steps[: steps.index(last) + 1]


@pytest.mark.parametrize("target", Layout)
def test_the_host_shares_and_prepares_while_weights_move(target):
    steps = RecordingSteps()
    outcome = run_switch(steps, alone, target)
    assert steps.calls == [*steps_to(target, "verify"), "commit"]
    assert (outcome.refused, outcome.kv_bytes, outcome.weight_bytes) == (None, 70, 900)


@pytest.mark.parametrize("target", Layout)
def test_a_refused_plan_takes_the_weights_back_and_moves_no_kv(target):
    steps = RecordingSteps(prepare_says="too full")
    outcome = run_switch(steps, alone, target)
    assert steps.calls == [*steps_to(target, "prepare"), "roll_back", "abandon"]
    assert (outcome.refused, outcome.kv_bytes) == ("rolled back: too full", 0)


@pytest.mark.parametrize("target", Layout)
def test_a_fault_is_rolled_back(target):
    steps = RecordingSteps(verify_says="bytes differ")
    outcome = run_switch(steps, alone, target)
    assert steps.calls == [*steps_to(target, "verify"), "roll_back", "abandon"]
    assert outcome.refused == "rolled back: bytes differ"


@pytest.mark.parametrize("step", ["move_weights", "move_kv"])
def test_a_layer_that_did_not_arrive_as_sent_is_rolled_back_at_once(step):
    """All ranks raise it alike, so there is no vote."""
    steps, votes = RecordingSteps(), []
    steps.break_at(step, Corrupted("w13/w2 of layer 1"))

    def agree(reason):
        votes.append(reason)

    outcome = run_switch(steps, agree, Layout.TP)
    assert steps.calls == [*steps_to(Layout.TP, step), "roll_back", "abandon"]
    assert outcome.refused == "rolled back: w13/w2 of layer 1"
    assert votes == [None] * (step == "move_kv")


@pytest.mark.parametrize("target", Layout)
@pytest.mark.parametrize("verify_says", [None, "bytes differ"])
def test_weights_stay_if_an_update_follows(target, verify_says):
    steps = RecordingSteps(verify_says=verify_says)
    outcome = run_switch(steps, alone, target, with_weights=False)
    assert outcome.weight_bytes == 0 and "move_weights" not in steps.calls and "move_kv" in steps.calls
    assert ("roll_back" in steps.calls) == (verify_says is not None)


def test_an_exception_in_what_a_rank_does_alone_is_its_reason_against():
    steps = RecordingSteps()
    steps.break_at("prepare", MemoryError("no room"))
    outcome = run_switch(steps, alone, Layout.TP)
    assert outcome.refused == "rolled back: prepare failed: MemoryError('no room')"
    assert steps.calls == [*steps_to(Layout.TP, "prepare"), "roll_back", "abandon"]


@pytest.mark.parametrize("step", TOGETHER)
def test_an_exception_in_what_ranks_do_together_ends_the_switch(step):
    steps = RecordingSteps()
    steps.break_at(step, RuntimeError(f"{step} broke"))
    with pytest.raises(RuntimeError, match=f"{step} broke"):
        run_switch(steps, alone, Layout.TP)
    assert steps.calls[-1] == step


def test_a_fault_on_the_way_back_ends_the_switch():
    steps = RecordingSteps(verify_says="bytes differ")
    steps.break_at("roll_back", Corrupted("k/v of layer 0"))
    with pytest.raises(Corrupted):
        run_switch(steps, alone, Layout.TP)
    assert steps.calls[-1] == "roll_back"


def test_times_by_phase():
    """A clock that goes on by one second at every reading: the phase that the host times takes one."""
    ticks = itertools.count()
    outcome = run_switch(RecordingSteps(), alone, Layout.TP, clock=lambda: float(next(ticks)))
    assert outcome.ms == {"decide": 1e3, "weights": 3.0, "kv": 2.0}


@given(
    target=st.sampled_from(list(Layout)),
    objections=st.lists(st.tuples(*[st.booleans()] * 3), min_size=1, max_size=6),
)
def test_all_ranks_take_the_same_way_whoever_objects(target, objections):
    """Each rank objects to the plan, or fails to make one, objects to what was moved, to both or to nothing; any
    objection counts for all."""
    ranks = []
    for rank, (prepare, verify, fails) in enumerate(objections):
        steps = RecordingSteps(f"plan {rank}" if prepare else None, f"fault {rank}" if verify else None)
        if prepare and fails:
            steps.break_at("prepare", ValueError(f"rank {rank}"))
        ranks.append(steps)

    def joined(column: int) -> str | None:
        return "; ".join(f"{column} of {rank}" for rank, said in enumerate(objections) if said[column]) or None

    votes = [joined(column) for column in range(2)]
    outcomes: list[Outcome] = []
    for steps, said in zip(ranks, objections, strict=True):
        answers, told = iter(votes), []  # what the collective gives every rank, and what this one gives

        def agree(reason: str | None, answers=answers, told=told) -> str | None:
            told.append(reason)
            return next(answers)

        outcomes.append(run_switch(steps, agree, target))
        assert [reason is not None for reason in told] == list(said[: len(told)])
    assert all(steps.calls == ranks[0].calls for steps in ranks)
    first = next((vote for vote in votes if vote), None)
    assert {outcome.refused for outcome in outcomes} == {first if first is None else f"rolled back: {first}"}
    calls = ranks[0].calls
    assert ("commit" in calls) == (first is None)
    assert ("roll_back" in calls) == ("abandon" in calls) == (first is not None)
