"""Names and units of every metric, in one table, and where they go: JSON lines, wandb, the console."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from moebius_engine.telemetry import StepReport, to_json_line
from rollout.line_file import LineFile

PREFIX = "moebius/"


@dataclass(frozen=True)
class Metric:
    """One scalar of a `StepReport`, logged as `moebius/<field>`; its description is the field's."""

    field: str
    unit: str

    @property
    def name(self) -> str:
        return PREFIX + self.field

    @property
    def description(self) -> str:
        return StepReport.model_fields[self.field].description or ""


METRICS: tuple[Metric, ...] = (
    Metric("step", "count"),
    Metric("threshold", "requests"),
    Metric("step_s", "s"),
    Metric("burst_s", "s"),
    Metric("tail_s", "s"),
    Metric("tail_share", "share"),
    Metric("tokens", "tokens"),
    Metric("tokens_burst", "tokens"),
    Metric("tokens_tail", "tokens"),
    Metric("tokens_per_s", "tokens/s"),
    Metric("tokens_per_s_burst", "tokens/s"),
    Metric("tokens_per_s_tail", "tokens/s"),
    Metric("responses", "count"),
    Metric("longest_response", "tokens"),
    Metric("switches", "count"),
    Metric("refused_switches", "count"),
    Metric("declined_switches", "count"),
    Metric("inflight_at_switch", "requests"),
    Metric("switch_ms_total", "ms"),
    Metric("switch_ms_decide", "ms"),
    Metric("switch_ms_metadata", "ms"),
    Metric("switch_ms_kv", "ms"),
    Metric("switch_ms_weights", "ms"),
    Metric("switch_ms_rest", "ms"),
    Metric("bytes_moved", "bytes"),
    Metric("idle_rank_share", "share"),
    Metric("expert_skew", "ratio"),
    Metric("expert_skew_worst", "ratio"),
    Metric("layout_at_end", "name"),
    Metric("weight_update_s", "s"),
    Metric("restarts", "count"),
    Metric("resumed_requests", "count"),
    Metric("lost_s", "s"),
)

# Series and full records: they stand in the JSON lines, and have no place in a table of scalars.
JSON_ONLY = frozenset({"switch_ms", "inflight", "switch_records", "estimates", "expert_load"})


def scalars(report: StepReport) -> dict[str, float | int | str]:
    """The report under its metric names; a value that is None (no switch, no sample) is left out."""
    values = {metric.name: getattr(report, metric.field) for metric in METRICS}
    return {name: value for name, value in values.items() if value is not None}


class Sink(Protocol):
    """Where step reports go."""

    def write(self, report: StepReport) -> None: ...

    def close(self) -> None: ...


class JsonLinesSink:
    """Appends one line a step to a file; each line is in it when `write` returns, unless the disk is full."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(path, append=True)

    def write(self, report: StepReport) -> None:
        self._file.write(to_json_line(report))

    def close(self) -> None:
        self._file.close()


class WandbSink:
    """Logs the table's scalars to a run of its own. `settings` are the keyword arguments of `wandb.init`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import wandb  # takes a second to import, and most users do not want it

        self._run = wandb.init(**settings)
        # The step is an axis of ours: wandb's own counter drops what comes in twice, as after a restart.
        self._run.define_metric(PREFIX + "step")
        self._run.define_metric(PREFIX + "*", step_metric=PREFIX + "step")

    def write(self, report: StepReport) -> None:
        self._run.log(scalars(report))

    def close(self) -> None:
        self._run.finish()


class ConsoleSink:
    """Prints one line a step."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, report: StepReport) -> None:
        self._console.print(console_line(report), highlight=False)

    def close(self) -> None:
        pass


def console_line(report: StepReport) -> str:
    at = "" if report.inflight_at_switch is None else f" at {report.inflight_at_switch} in flight"
    refused = f", {report.refused_switches} refused" if report.refused_switches else ""
    return (
        f"step {report.step}: {report.step_s:.2f} s (burst {report.burst_s:.2f}, tail {report.tail_s:.2f}), "
        f"{report.tokens:,} tokens at {report.tokens_per_s:,.0f}/s, "
        f"{report.switches} switches ({report.switch_ms_total:.1f} ms{at}{refused}), ends in {report.layout_at_end}"
    )
