"""Burst and tail of a rollout step: a pure function from a trace to a report.

The policy leaves EP when the in-flight count falls below T_h, so the burst is the time up to the first sample after
the last one with a count of at least T_h, and the tail is what remains. A step that never reaches T_h is all tail, one
that never falls below it again is all burst.
"""

from collections.abc import Sequence

from moebius_engine.telemetry import StepReport, StepTrace, TraceSample
from rollout.recovery.losses import Losses


def step_report(
    trace: StepTrace,
    response_lengths: Sequence[int],
    threshold: int,
    weight_update_s: float = 0.0,
    losses: Losses | None = None,
) -> StepReport:
    """Report of one step.

    trace: from `SwitchingEngine.end_step`; its last sample ends the step. response_lengths: tokens of each response
    returned. threshold: T_h in requests. weight_update_s: seconds of weight updates to book on this step. losses: what
    deaths of engines have cost in it.
    Raises ValueError for a threshold below 1.
    """
    if threshold < 1:
        raise ValueError(f"threshold must be at least 1 request, got {threshold}")
    losses = losses or Losses()
    end = trace.samples[-1] if trace.samples else None
    step_s, tokens = (end.t_s, end.tokens) if end else (0.0, 0)
    burst_s, tokens_burst = _end_of_burst(trace.samples, threshold)
    tail_s, tokens_tail = step_s - burst_s, tokens - tokens_burst
    done = [switch for switch in trace.switches if switch.refused is None]
    skews = [load.skew for load in trace.expert_load]
    to_tp = [switch for switch in done if switch.target == "tp"]
    return StepReport(
        step=trace.step,
        threshold=threshold,
        step_s=step_s,
        burst_s=burst_s,
        tail_s=tail_s,
        tail_share=_ratio(tail_s, step_s),
        tokens=tokens,
        tokens_burst=tokens_burst,
        tokens_tail=tokens_tail,
        tokens_per_s=_ratio(tokens, step_s),
        tokens_per_s_burst=_ratio(tokens_burst, burst_s),
        tokens_per_s_tail=_ratio(tokens_tail, tail_s),
        responses=len(response_lengths),
        longest_response=max(response_lengths, default=0),
        switches=len(done),
        refused_switches=len(trace.switches) - len(done),
        inflight_at_switch=to_tp[0].inflight if to_tp else None,
        switch_ms=tuple(switch.total_ms for switch in done),
        switch_ms_total=sum(switch.total_ms for switch in done),
        switch_ms_decide=sum(switch.decide_ms for switch in done),
        switch_ms_metadata=sum(switch.metadata_ms for switch in done),
        switch_ms_kv=sum(switch.kv_ms for switch in done),
        switch_ms_weights=sum(switch.weights_ms for switch in done),
        switch_ms_rest=sum(switch.rest_ms for switch in done),
        bytes_moved=sum(switch.kv_bytes + switch.weight_bytes for switch in done),
        idle_rank_share=_ratio(trace.idle_rank_steps, trace.rank_steps),
        layout_at_end=end.layout if end else None,
        weight_update_s=weight_update_s,
        inflight=_changes(trace.samples),
        switch_records=trace.switches,
        declined_switches=trace.declined,
        estimates=trace.estimates,
        expert_skew=sum(skews) / len(skews) if skews else None,
        expert_skew_worst=max(skews, default=None),
        expert_load=trace.expert_load,
        restarts=losses.restarts,
        resumed_requests=losses.resumed,
        lost_s=losses.lost_s,
    )


def _end_of_burst(samples: Sequence[TraceSample], threshold: int) -> tuple[float, int]:
    """(seconds, tokens) at the end of the burst: (0, 0) if the count never reaches the threshold."""
    for index in reversed(range(len(samples))):
        if samples[index].inflight >= threshold:
            boundary = samples[min(index + 1, len(samples) - 1)]
            return boundary.t_s, boundary.tokens
    return 0.0, 0


def _changes(samples: Sequence[TraceSample]) -> tuple[tuple[float, int], ...]:
    """The samples at which the in-flight count changes, and the last: a step curve without loss, and short."""
    kept = [
        sample
        for index, sample in enumerate(samples)
        if index in (0, len(samples) - 1) or sample.inflight != samples[index - 1].inflight
    ]
    return tuple((sample.t_s, sample.inflight) for sample in kept)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
