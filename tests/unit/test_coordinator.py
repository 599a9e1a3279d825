"""The protocol of a switch: the order of its steps, what a refusal leaves untouched, and how a fault is undone."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.layout import Layout
from moebius_engine.switch.coordinator import Outcome, run_switch


class RecordingSteps:
    """Steps of one rank that only write down what was called. plan_says, verify_says: its reasons against."""

    def __init__(self, plan_says: str | None = None, verify_says: str | None = None):
        self.calls: list[str] = []
        self._plan_says, self._verify_says = plan_says, verify_says

    def settle(self) -> None:
        self.calls.append("settle")

    def plan(self, target: Layout) -> str | None:
        self.calls.append(f"plan {target}")
        return self._plan_says

    def move_weights(self) -> int:
        self.calls.append("move_weights")
        return 900

    def move_kv(self) -> int:
        self.calls.append("move_kv")
        return 70

    def prepare(self) -> None:
        self.calls.append("prepare")

    def finish(self) -> dict[str, float]:
        self.calls.append("finish")
        return {"weights": 3.0, "kv": 2.0}

    def return_weights(self) -> None:
        self.calls.append("return_weights")

    def return_kv(self) -> None:
        self.calls.append("return_kv")

    def verify(self) -> str | None:
        self.calls.append("verify")
        return self._verify_says

    def commit(self) -> None:
        self.calls.append("commit")

    def abandon(self) -> None:
        self.calls.append("abandon")


def alone(reason: str | None) -> str | None:
    """Agreement of a single rank."""
    return reason


MOVES = ["move_weights", "move_kv", "prepare", "finish"]
RETURNS = ["return_kv", "return_weights", "finish"]


@pytest.mark.parametrize("target", Layout)
def test_the_host_prepares_while_bytes_move(target):
    steps = RecordingSteps()
    outcome = run_switch(steps, alone, target)
    assert steps.calls == ["settle", f"plan {target}", *MOVES, "verify", "commit"]
    assert (outcome.refused, outcome.kv_bytes, outcome.weight_bytes) == (None, 70, 900)


@pytest.mark.parametrize("target", Layout)
def test_a_refusal_leaves_everything_where_it_is(target):
    steps = RecordingSteps(plan_says="too full")
    outcome = run_switch(steps, alone, target)
    assert steps.calls == ["settle", f"plan {target}", "abandon"]
    assert (outcome.refused, outcome.kv_bytes, outcome.weight_bytes) == ("too full", 0, 0)


@pytest.mark.parametrize("target", Layout)
def test_a_fault_is_undone_in_the_reverse_order(target):
    steps = RecordingSteps(verify_says="bytes differ")
    outcome = run_switch(steps, alone, target)
    assert steps.calls == ["settle", f"plan {target}", *MOVES, "verify", *RETURNS, "abandon"]
    assert outcome.refused == "rolled back: bytes differ"


@pytest.mark.parametrize("target", Layout)
@pytest.mark.parametrize("verify_says", [None, "bytes differ"])
def test_weights_stay_if_an_update_follows(target, verify_says):
    steps = RecordingSteps(verify_says=verify_says)
    outcome = run_switch(steps, alone, target, with_weights=False)
    assert not any("weights" in call for call in steps.calls)
    assert outcome.weight_bytes == 0 and "move_kv" in steps.calls
    assert ("return_kv" in steps.calls) == (verify_says is not None)


@pytest.mark.parametrize("step", ["settle", "plan", "move_weights", "move_kv", "prepare", "finish", "verify", "commit"])
def test_an_exception_is_not_taken_for_a_refusal(step):
    steps = RecordingSteps()

    def fail(*_):
        raise RuntimeError(f"{step} broke")

    setattr(steps, step, fail)
    with pytest.raises(RuntimeError, match=f"{step} broke"):
        run_switch(steps, alone, Layout.TP)
    assert "abandon" not in steps.calls and not any("return" in call for call in steps.calls)


def test_times_by_phase():
    """A clock that goes on by one second at every reading: each step that the host times takes one."""
    ticks = itertools.count()
    outcome = run_switch(RecordingSteps(), alone, Layout.TP, clock=lambda: float(next(ticks)))
    assert outcome.ms == {"decide": 1e3, "metadata": 1e3, "weights": 3.0, "kv": 2.0}


@given(
    target=st.sampled_from(list(Layout)),
    objections=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=6),
)
def test_all_ranks_take_the_same_way_whoever_objects(target, objections):
    """Each rank objects to the plan, to what was moved, to both or to nothing; any objection counts for all."""
    ranks = [
        RecordingSteps(f"plan {rank}" if plan else None, f"fault {rank}" if verify else None)
        for rank, (plan, verify) in enumerate(objections)
    ]

    def joined(reasons: list[str]) -> str | None:
        return "; ".join(reasons) or None

    plans = joined([f"plan {rank}" for rank, (plan, _) in enumerate(objections) if plan])
    faults = joined([f"fault {rank}" for rank, (_, verify) in enumerate(objections) if verify])
    outcomes: list[Outcome] = []
    for steps in ranks:
        answers = iter([plans, faults])  # what the collective gives every rank
        said: list[str | None] = []

        def agree(reason: str | None, said=said, answers=answers) -> str | None:
            said.append(reason)
            return next(answers)

        outcomes.append(run_switch(steps, agree, target))
        assert said[0] == steps._plan_says and said[1:] == ([] if plans else [steps._verify_says])
    assert all(steps.calls == ranks[0].calls for steps in ranks)
    assert {outcome.refused for outcome in outcomes} == {plans or (faults and f"rolled back: {faults}")}
    calls = ranks[0].calls
    assert ("commit" in calls) == (not plans and not faults)
    assert ("abandon" in calls) == bool(plans or faults)
    assert any("move" in call for call in calls) == (not plans)
