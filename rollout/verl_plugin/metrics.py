"""Step metrics of all replicas as one set of numbers: the table of their names, and a pure function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moebius_engine.telemetry import StepReport, UpdateRecord
from rollout.metrics import PREFIX

Results = tuple[Sequence[StepReport], Sequence[UpdateRecord]]
"""Of one replica: the steps that have ended and the weight updates that were taken, in order."""

_RULES: Mapping[str, Callable[[Sequence[float]], float]] = {"sum": sum, "max": max, "last": lambda values: values[-1]}


@dataclass(frozen=True)
class StepMetric:
    """One number of verl's step line, `moebius/<name>`.

    over_steps: how several reports of one replica become one number. over_replicas: how those of the replicas do, which
    run at the same time. Both are keys of _RULES.
    """

    name: str
    unit: str
    over_steps: str
    over_replicas: str
    meaning: str


STEP_METRICS = (
    StepMetric("step_s", "s", "sum", "max", "duration of the rollout step, until its last response"),
    StepMetric("threshold", "requests", "last", "max", "where burst and tail part, calibrated or given"),
    StepMetric("burst_s", "s", "sum", "max", "until the requests in flight fall below the threshold for good"),
    StepMetric("tail_s", "s", "sum", "max", "from there to the end"),
    StepMetric("tail_share", "share", "last", "max", "tail_s / step_s"),
    StepMetric("tokens_burst", "tokens", "sum", "sum", "generated in the burst"),
    StepMetric("tokens_tail", "tokens", "sum", "sum", "generated in the tail"),
    StepMetric("longest_response", "tokens", "max", "max", "length of the longest response"),
    StepMetric("switches", "count", "sum", "sum", "committed switches"),
    StepMetric("refused_switches", "count", "sum", "sum", "refused switches"),
    StepMetric("declined_switches", "count", "sum", "sum", "times that payoff spoke against a switch"),
    StepMetric("inflight_at_switch", "requests", "max", "max", "requests in flight at the first switch to TP"),
    StepMetric("switch_ms_total", "ms", "sum", "max", "time of all switches"),
    StepMetric("switch_ms_decide", "ms", "sum", "max", "of it: deciding, checking room, agreeing"),
    StepMetric("switch_ms_metadata", "ms", "sum", "max", "of it: redistributing requests"),
    StepMetric("switch_ms_kv", "ms", "sum", "max", "of it: moving KV"),
    StepMetric("switch_ms_weights", "ms", "sum", "max", "of it: moving expert weights"),
    StepMetric("switch_ms_rest", "ms", "sum", "max", "of it: the rest"),
    StepMetric("bytes_moved", "bytes", "sum", "sum", "KV and weights that the switches moved, by all ranks"),
    StepMetric("expert_skew", "ratio", "last", "max", "tokens of the EP rank whose experts get most, over the mean"),
    StepMetric("layout_at_end", "0 EP, 1 TP", "last", "max", "layout in which the step ended"),
    StepMetric("weight_update_s", "s", "sum", "max", "weight updates since the step line before"),
    StepMetric("weight_update_bytes", "bytes", "sum", "sum", "size of the tensors of those updates"),
)


def merge(results: Sequence[Results]) -> dict[str, float]:
    """The step metrics of all replicas; with several, each one's too, as `moebius/replica_<i>/<name>`.

    What nothing is known of is left out: all but the weight update's before a step has ended, inflight_at_switch
    without a switch.
    """
    replicas = [_replica(reports, updates) for reports, updates in results]
    merged: dict[str, float] = {}
    for metric in STEP_METRICS:
        values = [replica[metric.name] for replica in replicas if metric.name in replica]
        if values:
            merged[PREFIX + metric.name] = _RULES[metric.over_replicas](values)
    if len(replicas) > 1:
        for rank, replica in enumerate(replicas):
            merged |= {f"{PREFIX}replica_{rank}/{name}": value for name, value in replica.items()}
    return merged


def _replica(reports: Sequence[StepReport], updates: Sequence[UpdateRecord]) -> dict[str, float]:
    rows = [_numbers(report) for report in reports]
    rows += [{"weight_update_s": update.seconds, "weight_update_bytes": update.bytes} for update in updates]
    merged: dict[str, float] = {}
    for metric in STEP_METRICS:
        values = [row[metric.name] for row in rows if metric.name in row]
        if values:
            merged[metric.name] = _RULES[metric.over_steps](values)
    if len(reports) > 1:
        merged["tail_share"] = merged["tail_s"] / merged["step_s"] if merged["step_s"] else 0.0
    return merged


def _numbers(report: StepReport) -> dict[str, float]:
    values = {metric.name: getattr(report, metric.name, None) for metric in STEP_METRICS}
    del values["weight_update_s"]  # from the updates themselves, which no report need follow
    values["layout_at_end"] = None if report.layout_at_end is None else float(report.layout_at_end == "tp")
    return {name: value for name, value in values.items() if value is not None}
