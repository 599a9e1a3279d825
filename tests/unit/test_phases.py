import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.telemetry import StepTrace, SwitchRecord, TraceSample
from rollout.phases import step_report


def trace(*points: tuple[float, int, int], switches=(), **counts) -> StepTrace:
    """points: (t_s, inflight, tokens)."""
    samples = tuple(TraceSample(t_s=t, inflight=n, tokens=k, layout="ep") for t, n, k in points)
    return StepTrace(step=0, samples=samples, switches=switches, **counts)


def switch(target: str = "tp", refused: str | None = None, running: int = 5) -> SwitchRecord:
    return SwitchRecord(
        source="ep" if target == "tp" else "tp", target=target, reason="policy", step=0, forward_ct=1, started_at_s=1.0,
        running=running, waiting=1, prefilling=1, kv_tokens=10, decide_ms=1, metadata_ms=2, kv_ms=3, weights_ms=4,
        rest_ms=5, total_ms=15, kv_bytes=100, weight_bytes=200, refused=refused,
    )  # fmt: skip


@st.composite
def traces(draw) -> StepTrace:
    # Whole nanoseconds, as a clock gives them: shorter times would make rates overflow.
    steps = draw(st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 64), st.integers(0, 64)), max_size=40))
    points, t_ns, tokens = [], 0, 0
    for nanoseconds, inflight, more in steps:
        t_ns, tokens = t_ns + nanoseconds, tokens + more
        points.append((t_ns / 1e9, inflight, tokens))
    return trace(*points)


@given(traces(), st.integers(1, 70), st.lists(st.integers(0, 500), max_size=5))
def test_burst_and_tail_make_the_step(step, threshold, lengths):
    report = step_report(step, lengths, threshold)
    assert report.burst_s + report.tail_s == pytest.approx(report.step_s)
    assert report.tokens_burst + report.tokens_tail == report.tokens
    assert 0 <= report.tail_share <= 1
    assert report.longest_response == max(lengths, default=0)
    assert report.responses == len(lengths)
    if all(sample.inflight < threshold for sample in step.samples):
        assert (report.burst_s, report.tokens_burst) == (0, 0)
    # Nothing at or above the threshold lies after the split.
    assert all(s.inflight < threshold for s in step.samples if s.t_s > report.burst_s)


@given(traces())
def test_the_curve_keeps_every_change_and_both_ends(step):
    kept = step_report(step, [], 8).inflight
    assert set(kept) <= {(s.t_s, s.inflight) for s in step.samples}
    runs = [s.inflight for i, s in enumerate(step.samples) if i == 0 or s.inflight != step.samples[i - 1].inflight]
    assert [n for i, (_, n) in enumerate(kept) if i == 0 or n != kept[i - 1][1]] == runs
    if step.samples:
        assert kept[-1] == (step.samples[-1].t_s, step.samples[-1].inflight)


def test_the_split_is_where_the_count_passes_the_threshold_for_the_last_time():
    step = trace((0, 8, 0), (1, 3, 8), (2, 6, 11), (3, 4, 17), (4, 3, 21), (6, 0, 27))
    report = step_report(step, [9, 18], threshold=4)
    assert (report.burst_s, report.tail_s, report.tokens_burst, report.tokens_tail) == (4, 2, 21, 6)
    assert (report.tokens_per_s, report.tokens_per_s_burst, report.tokens_per_s_tail) == (4.5, 5.25, 3)
    assert report.tail_share == pytest.approx(1 / 3)


def test_a_step_that_never_falls_below_is_all_burst_and_an_empty_one_is_nothing():
    assert step_report(trace((0, 8, 0), (2, 8, 16)), [], threshold=4).burst_s == 2
    empty = step_report(trace(), [], threshold=4)
    assert (empty.step_s, empty.tokens, empty.tail_share, empty.layout_at_end) == (0, 0, 0, None)


def test_refused_switches_are_counted_apart():
    step = trace((0, 8, 0), (2, 0, 16), switches=(switch(refused="too full"), switch(), switch("ep", running=9)))
    report = step_report(step, [], threshold=4)
    assert (report.switches, report.refused_switches, report.inflight_at_switch) == (2, 1, 7)
    assert report.switch_ms == (15, 15)
    parts = (report.switch_ms_decide, report.switch_ms_metadata, report.switch_ms_kv, report.switch_ms_weights)
    assert parts == (2, 4, 6, 8)
    assert sum(parts) + report.switch_ms_rest == report.switch_ms_total == 30
    assert report.bytes_moved == 600
    assert len(report.switch_records) == 3


def test_idle_ranks_and_weight_updates():
    report = step_report(trace((0, 8, 0), (2, 0, 16), rank_steps=20, idle_rank_steps=5), [], 4, weight_update_s=1.5)
    assert (report.idle_rank_share, report.weight_update_s) == (0.25, 1.5)


def test_a_threshold_below_one_is_refused():
    with pytest.raises(ValueError, match="threshold must be at least 1 request, got 0"):
        step_report(trace(), [], 0)
