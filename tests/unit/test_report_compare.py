"""Ratios, means and gaps of synthetic runs; no file, no engine."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.report.charts import GROUPS, bar_groups
from rollout.report.compare import gaps, mean, shared_steps, speedups, switch_costs
from rollout.report.json_lines import to_step
from rollout.report.page import headlines
from rollout.report.run import Run, make_run, name_steps
from tests.unit.report_cases import switch, synthetic


def run(kind: str, *times: tuple[float, float], name: str | None = None, first: int = 1, tokens: int = 100) -> Run:
    steps = [synthetic(kind, number, *both, tokens) for number, both in enumerate(times, start=first)]
    return make_run(name, None, Path(f"{kind}.jsonl"), [to_step(step) for step in steps])


SWITCHING = run("switching", (2, 2), (4, 2))
TP, EP = run("tp", (4, 2), (6, 2)), run("ep", (2, 6), (4, 8))


def test_ratios_of_a_step_and_the_better_layout_in_that_step():
    other = run("ep", (2, 3), (4, 8))  # EP is the better one in step 1, TP in step 2
    one, two = speedups(SWITCHING, [TP, other, SWITCHING]).values()
    assert (one.over_tp, one.over_ep, one.better, one.worse) == (6 / 4, 5 / 4, 5 / 4, 6 / 4)
    assert (two.over_tp, two.over_ep, two.better, two.worse) == (8 / 6, 12 / 6, 8 / 6, 12 / 6)


def test_headline_is_the_mean_of_the_steps_ratios():
    (sentence,) = headlines([TP, EP, SWITCHING])
    better = (6 / 4 + 8 / 6) / 2
    assert sentence == (
        f"switching: {better:.2f}× (1.33 to 1.50) over the better static layout, 2.00× (2.00 to 2.00) over the worse, "
        "2 steps."
    )


@given(st.lists(st.tuples(*[st.floats(0.01, 1e4)] * 3), min_size=1, max_size=20))
def test_better_and_worse_lie_around_what_an_oracle_would_pick(times):
    runs = [run(kind, *[(row[i], 0.0) for row in times]) for i, kind in enumerate(("tp", "ep", "switching"))]
    for (tp_s, ep_s, own_s), ratio in zip(times, speedups(runs[2], runs).values(), strict=True):
        assert ratio.better == pytest.approx(min(tp_s, ep_s) / own_s)
        assert ratio.worse == pytest.approx(max(tp_s, ep_s) / own_s)


def test_without_one_static_layout_nothing_is_called_better():
    ratio = speedups(SWITCHING, [TP, SWITCHING])[1]
    assert (ratio.over_tp, ratio.over_ep, ratio.better, ratio.worse) == (1.5, None, None, None)
    assert headlines([TP, SWITCHING]) == ["switching: 1.42× (1.33 to 1.50) over static TP, 2 steps."]
    (words,) = gaps([TP, SWITCHING])
    assert words.startswith("No static EP run was given: which static layout is the better one is not known")


def test_without_any_static_layout_there_is_no_ratio():
    assert speedups(SWITCHING, [SWITCHING]) == {}
    assert gaps([SWITCHING]) == ["No static run was given, so there is no speed-up."]
    assert gaps([TP, EP]) == ["No switching run was given, so there is no speed-up."]


def test_only_steps_of_all_runs_are_compared():
    late = run("ep", (4, 8), (4, 8), first=2)
    runs = [TP, late, SWITCHING]
    assert shared_steps(runs) == list(speedups(SWITCHING, runs)) == [2]
    assert [words for words in gaps(runs) if "lacks" in words] == [
        f"{title}: another run lacks step {number}; left out of charts, ratios and means."
        for title, number in (("static TP", 1), ("static EP", 3), ("switching", 1))
    ]
    assert "no step number in common" in gaps([run("tp", (1, 1)), run("switching", (1, 1), first=5)])[-1]


def test_a_step_without_time_has_no_ratio():
    runs = [TP, run("switching", (2, 2), (0, 0))]
    assert list(speedups(runs[1], runs)) == [1]
    assert "switching: no time passed in step 2, so there is no ratio." in gaps(runs)


def test_unequal_work_is_said():
    runs = [TP, run("switching", (2, 2), (4, 2), tokens=80)]
    assert "in steps 1, 2, by up to 20.0%: their times are of unequal work" in gaps(runs)[-1]


def test_mean():
    assert mean([1.0, 2.0]) == 1.5
    assert mean([]) is None
    assert mean([1.0, None]) is None


def test_switch_costs_are_means_over_switches_by_direction():
    there, back = synthetic("switching", 1, 2, 2), synthetic("switching", 2, 2, 2)
    records = (switch(2, 0, source="tp", target="ep", reason="step", kv_ms=9, total_ms=21), switch(2, 2, kv_ms=5))
    refused = switch(2, 3, refused="no room for 9 tokens", kv_ms=100)
    back = back.model_copy(update={"switch_records": (*records, refused)})
    made = make_run(None, None, Path("a"), [to_step(there), to_step(back)])
    to_tp, to_ep = switch_costs([made])
    assert (to_tp.direction, to_tp.switches, to_tp.phase_ms["kv"]) == ("ep→tp", 2, 4)
    assert (to_ep.direction, to_ep.switches, to_ep.phase_ms["kv"]) == ("tp→ep", 1, 9)
    assert to_ep.total_ms == 1 + 2 + 9 + 4 + 5


def test_kind_is_what_the_run_did():
    assert [(one.kind, one.title) for one in (TP, EP, SWITCHING)] == [
        ("tp", "static TP"),
        ("ep", "static EP"),
        ("switching", "switching"),
    ]
    assert run("tp", (1, 1), name="before").title == "before"
    refused = synthetic("ep", 1, 1, 1).model_copy(update={"switch_records": (switch(1, 1, refused="no room"),)})
    assert make_run(None, None, Path("a"), [to_step(refused)]).kind == "switching"


def test_the_switch_to_the_layout_of_a_steps_beginning_makes_no_switching_run():
    begins = synthetic("tp", 1, 1, 1).model_copy(update={"switch_records": (switch(1, 0, reason="step"),)})
    assert make_run(None, None, Path("a"), [to_step(begins)]).kind == "tp"


def test_a_name_may_say_that_a_run_that_never_switched_would_have():
    named = run("ep", (1, 1), name="switching")
    assert (named.kind, named.why) == ("switching", "by its name; it made no switch")
    assert "switching: no switch was made, so it has no switch cost." in gaps([TP, named])


@pytest.mark.parametrize(("kind", "name"), [("switching", "tp"), ("switching", "ep"), ("ep", "tp"), ("tp", "ep")])
def test_a_name_that_contradicts_the_run_is_refused(kind, name):
    with pytest.raises(ValueError, match=rf"{kind}.jsonl is named {name}, but it is .*give it another name"):
        run(kind, (1, 1), name=name)


def test_of_several_lines_for_a_step_the_last_counts():
    steps = [to_step(synthetic("tp", 1, seconds, 0)) for seconds in (5, 7)]
    made = make_run(None, None, Path("a"), steps)
    assert made.steps[1].step_s == 7
    assert made.notes == ("Several lines for step 1: the last one counts.",)


def test_an_empty_run_is_refused():
    with pytest.raises(ValueError, match="a is an empty run: no rollout step has ended in it"):
        make_run(None, None, Path("a"), [])


@given(st.lists(st.integers(), unique=True, max_size=300).map(sorted))
def test_bars_are_groups_of_all_steps_in_order(numbers):
    groups = bar_groups(numbers)
    assert [number for group in groups for number in group] == numbers
    assert len(groups) == min(GROUPS, len(numbers)) and all(groups)
    assert max(map(len, groups), default=0) - min(map(len, groups), default=0) <= 1


def test_names_of_steps():
    assert name_steps([3]) == "step 3"
    assert name_steps([3, 4]) == "steps 3, 4"
    assert name_steps(range(9)) == "9 steps (0 to 8)"
