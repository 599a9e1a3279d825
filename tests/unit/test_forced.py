"""What `verify --dtype bfloat16` calls a difference: more than runs without a switch show."""

import random

import pytest

from rollout.forced import ForcedFindings
from tests.unit.test_verify import record


def runs(answers: int, noise: float, seed: int = 0) -> tuple[list[dict], list[dict]]:
    """Answers of 20 tokens, and the same tokens read again, their logprobs `noise` apart on average."""
    draw = random.Random(seed)
    drawn, read = [], []
    for _ in range(answers):
        logprobs = [draw.uniform(-3, 0) for _ in range(20)]
        drawn.append(
            {"output_ids": list(range(20)), "meta_info": {"output_token_logprobs": [(p, 1) for p in logprobs]}}
        )
        again = [(None, 5), *((p + draw.choice((-1, 1)) * draw.uniform(0.5, 1.5) * noise, 1) for p in logprobs)]
        read.append({"meta_info": {"input_token_logprobs": again}})
    return drawn, read


def unswitched() -> ForcedFindings:
    made = ForcedFindings()
    made.add_switch(1, record())
    for seed in (1, 2):
        made.add_unswitched(*runs(30, 0.01, seed))
    return made


def findings(noise: float) -> ForcedFindings:
    made = unswitched()
    made.add_switched(list(range(30)), *runs(30, noise, 3))
    return made


def test_the_same_spread_is_ok():
    made = findings(0.01)
    assert made.faults == []
    result = made.result()
    assert (result["ok"], result["requests"], result["tokens_compared"]) == (True, 30, 600)
    assert result["forced_logprob_diff"] == pytest.approx(0.01, rel=0.1)
    assert result["forced_logprob_spread"] == pytest.approx(0.01, rel=0.1)
    assert result["max_logprob_diff"] <= 0.015 + 1e-9


def test_a_larger_mean_is_a_fault():
    (fault,) = findings(0.0135).faults
    assert "apart on average, more than 1.25 times" in fault


def test_one_request_far_off_is_a_fault_although_the_mean_is_not():
    made = unswitched()
    drawn, read = runs(40, 0.01, 4)
    far = runs(1, 0.03, 5)
    made.add_switched([*range(40), 77], drawn + far[0], read + far[1])
    (fault,) = made.faults
    assert fault.startswith("logprobs of request 77 lie")


def test_a_missing_logprob_is_a_fault():
    drawn, read = runs(1, 0.01)
    read[0]["meta_info"]["input_token_logprobs"][3] = (None, 1)
    made = ForcedFindings()
    made.add_unswitched(drawn, read)
    assert made.faults == ["unswitched request 0: 20 logprobs drawn, 20 read, or one of them is missing"]
    made.add_switched([], [], [])
    assert made.faults[-1] == "no answer was compared"
    assert not made.result()["ok"]


def test_layouts_that_lie_further_apart_set_the_measure():
    """A switched answer is drawn in both layouts and read in one."""
    made = unswitched()
    made.add_unswitched(*runs(30, 0.02, 6))
    made.add_switched(list(range(30)), *runs(30, 0.02, 3))
    assert made.faults == [] and made.result()["forced_logprob_spread"] == pytest.approx(0.02, rel=0.1)
