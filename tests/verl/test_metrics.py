"""Many replicas' reports as one set of numbers."""

from pathlib import Path

import pytest

from moebius_engine.telemetry import LayerLoad, StepReport, UpdateRecord
from rollout.phases import step_report
from rollout.verl_plugin.metrics import STEP_METRICS, merge
from tests.unit.test_phases import switch, trace


def report(step_s: float, switches=(), lengths=(3,)) -> StepReport:
    """The burst ends half-way."""
    points = ((0.0, 8, 0), (step_s / 2, 1, 60), (step_s, 0, 80))
    load = (LayerLoad(layer=0, rank_tokens=(30, 10)),)
    return step_report(trace(*points, switches=switches, expert_load=load), lengths, threshold=4)


UPDATE = UpdateRecord(seconds=0.5, bytes=100, tensors=2, layout="ep")


def test_one_replica():
    merged = merge([([report(4.0, [switch()], [3, 9])], [UPDATE])])
    assert {name.removeprefix("moebius/") for name in merged} == {metric.name for metric in STEP_METRICS}
    assert merged["moebius/step_s"] == 4.0 and merged["moebius/tail_share"] == 0.5
    assert merged["moebius/longest_response"] == 9 and merged["moebius/bytes_moved"] == 300
    assert merged["moebius/expert_skew"] == 1.5
    assert merged["moebius/layout_at_end"] == 0.0 and merged["moebius/inflight_at_switch"] == 7
    assert merged["moebius/weight_update_s"] == 0.5 and merged["moebius/weight_update_bytes"] == 100


def test_replicas_run_at_the_same_time():
    merged = merge(
        [([report(4.0, [switch()])], [UPDATE]), ([report(6.0, [switch(), switch(refused="full")])], [UPDATE])]
    )
    assert merged["moebius/step_s"] == 6.0 and merged["moebius/switches"] == 2
    assert merged["moebius/refused_switches"] == 1 and merged["moebius/tokens_tail"] == 40
    assert merged["moebius/weight_update_s"] == 0.5 and merged["moebius/weight_update_bytes"] == 200
    assert merged["moebius/replica_0/step_s"] == 4.0 and merged["moebius/replica_1/step_s"] == 6.0


def test_steps_of_one_replica_come_one_after_the_other():
    merged = merge([([report(4.0), report(2.0, lengths=[5])], [UPDATE, UPDATE])])
    assert merged["moebius/step_s"] == 6.0 and merged["moebius/tail_share"] == pytest.approx(0.5)
    assert merged["moebius/longest_response"] == 5 and merged["moebius/weight_update_s"] == 1.0


def test_what_is_not_known_is_left_out():
    assert merge([]) == merge([([], [])]) == {}
    assert set(merge([([], [UPDATE])])) == {"moebius/weight_update_s", "moebius/weight_update_bytes"}
    assert "moebius/inflight_at_switch" not in merge([([report(1.0)], [])])


def test_switches_that_payoff_declined_are_counted_over_replicas():
    declined = report(4.0).model_copy(update={"declined_switches": 3})
    merged = merge([([declined, report(2.0)], []), ([declined], [])])
    assert merged["moebius/declined_switches"] == 6 and merged["moebius/replica_0/declined_switches"] == 3


def test_every_value_is_a_number():
    merged = merge([([report(4.0, [switch()])], [UPDATE])] * 2)
    assert all(type(value) in (int, float) for value in merged.values())


@pytest.mark.parametrize("metric", STEP_METRICS, ids=lambda metric: metric.name)
def test_the_documentation_has_every_metric(metric):
    page = Path(__file__).parents[2].joinpath("docs", "verl.md").read_text()
    assert f"| `{metric.name}` | {metric.unit} | {metric.over_replicas} | {metric.meaning} |" in page
