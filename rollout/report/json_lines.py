"""Steps from the JSON lines that RolloutActor and the demo write, one StepReport a line."""

from pathlib import Path

from moebius_engine.telemetry import StepReport, SwitchRecord, read_json_lines
from rollout.report.run import PHASES, Cost, Mark, Step


def read_steps(path: Path) -> list[Step]:
    """Raises ValueError, with the line's number, for a line that is no StepReport or has an unknown field."""
    return [to_step(report) for report in read_json_lines(path, StepReport)]


def to_step(report: StepReport) -> Step:
    done = [record for record in report.switch_records if record.refused is None]
    return Step(
        number=report.step,
        step_s=report.step_s,
        burst_s=report.burst_s,
        tail_s=report.tail_s,
        tokens=report.tokens,
        threshold=report.threshold,
        layout_at_end=report.layout_at_end,
        switched=any(record.reason != "step" for record in report.switch_records),
        costs=tuple(
            _cost(direction, [record for record in done if _direction(record) == direction])
            for direction in sorted({_direction(record) for record in done})
        ),
        inflight=report.inflight,
        marks=tuple(Mark(record.started_at_s, record.inflight, _direction(record), record.total_ms) for record in done),
    )


def _direction(record: SwitchRecord) -> str:
    return f"{record.source}→{record.target}"


def _cost(direction: str, records: list[SwitchRecord]) -> Cost:
    phase_ms = {phase: sum(getattr(record, f"{phase}_ms") for record in records) for phase in PHASES}
    return Cost(direction, len(records), phase_ms)
