"""What a switch, a step and a weight update report: the one schema, of the engine, the actor, the files and wandb.

Every model is frozen and refuses unknown fields and non-finite numbers. A field's description ends with its unit in
square brackets where it has one. The engine fills `StepTrace` (what happened, in order) and `UpdateRecord`;
`rollout.phases.step_report` makes a `StepReport` (what it means) of a trace.
"""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

LayoutName = Literal["ep", "tp"]
SwitchReason = Literal["policy", "explicit", "step", "calibration"]


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PayoffEstimate(Record):
    """What a switch would gain, against its cost (switch/payoff.py)."""

    target: LayoutName = Field(description="layout asked for")
    inflight: NonNegativeInt = Field(description="requests in flight [requests]")
    running: NonNegativeInt = Field(description="those of them whose lengths so far the estimate rests on [responses]")
    known: NonNegativeInt = Field(description="finished responses that it rests on [responses]")
    steps_left: float = Field(description="expected decode steps until the last response ends [steps]")
    faster_s: float = Field(description="what the target saves in the next decode step [s]")
    gain_s: float = Field(description="what the target is expected to save in the rest of the step [s]")
    cost_s: float = Field(description="pause of the switch [s]")

    @property
    def pays(self) -> bool:
        """If the target is not the faster layout yet, the switch can wait. If fewer responses are known than run, the
        estimate is no reason against it."""
        return self.faster_s > 0 and (self.known < self.running or self.gain_s > self.cost_s)


class SwitchRecord(Record):
    """One switch, committed or refused. Byte counts are those moved by all ranks together."""

    source: LayoutName = Field(description="layout before the switch")
    target: LayoutName = Field(description="layout asked for")
    reason: SwitchReason = Field(description="who asked: the policy, a caller, the start of a step, or calibration")
    step: int = Field(description="rollout step in which it happened")
    forward_ct: NonNegativeInt = Field(description="forward steps of rank 0 before the switch")
    started_at_s: float = Field(description="when the decision fell, since the rollout step began [s]")
    running: NonNegativeInt = Field(description="requests being decoded, on all ranks [requests]")
    waiting: NonNegativeInt = Field(description="requests not yet prefilled, on all ranks [requests]")
    prefilling: NonNegativeInt = Field(description="requests half-prefilled, in neither other count [requests]")
    kv_tokens: NonNegativeInt = Field(description="tokens whose KV was live, a shared one counted once [tokens]")
    decide_ms: float = Field(description="to check capacity and to settle the batch in flight [ms]")
    metadata_ms: float = Field(description="to exchange and place requests, after the weights have moved [ms]")
    kv_ms: float = Field(description="to move KV [ms]")
    weights_ms: float = Field(description="to move expert weights [ms]")
    rest_ms: float = Field(description="the remainder: votes, fences, the flip [ms]")
    total_ms: float = Field(description="from the decision to the first step that can run in the target layout [ms]")
    checks_ms: float = Field(
        default=0.0, description="of kv and weights: comparing layers with what was sent, where it was their turn [ms]"
    )
    kv_bytes: NonNegativeInt = Field(description="KV moved [bytes]")
    weight_bytes: NonNegativeInt = Field(description="expert weights moved [bytes]")
    refused: str | None = Field(default=None, description="why it did not happen, with the numbers; None if it did")

    @property
    def inflight(self) -> int:
        """Requests in flight when it was decided [requests]."""
        return self.running + self.waiting + self.prefilling


class TraceSample(Record):
    """The state after one forward step (or at a change of the in-flight count)."""

    t_s: float = Field(ge=0, description="since the rollout step began [s]")
    inflight: NonNegativeInt = Field(description="running + waiting + prefilling, on all ranks [requests]")
    tokens: NonNegativeInt = Field(description="tokens generated so far in this rollout step [tokens]")
    layout: LayoutName = Field(description="layout that is live")


class LayerLoad(Record):
    """How many tokens of one layer were routed to each EP rank's experts; a token counts once for each of its k."""

    layer: NonNegativeInt = Field(description="number of the layer")
    rank_tokens: tuple[NonNegativeInt, ...] = Field(description="routed to each rank's experts [tokens]")

    @property
    def skew(self) -> float:
        """Tokens of the rank that got most, over the mean."""
        return max(self.rank_tokens) * len(self.rank_tokens) / sum(self.rank_tokens)


class StepTrace(Record):
    """What happened in one rollout step. Samples are in order of time; the last one ends the step."""

    step: int = Field(description="number of the rollout step")
    samples: tuple[TraceSample, ...] = Field(default=(), description="in-flight count and tokens over time")
    switches: tuple[SwitchRecord, ...] = Field(default=(), description="all switches, committed and refused, in order")
    rank_steps: NonNegativeInt = Field(default=0, description="decode steps times ranks")
    idle_rank_steps: NonNegativeInt = Field(default=0, description="those of them in which the rank had no request")
    estimates: tuple[PayoffEstimate, ...] = Field(
        default=(), description="first and last estimate that spoke against a switch, and one that spoke for it"
    )
    declined: NonNegativeInt = Field(default=0, description="how often an estimate spoke against a switch")
    expert_load: tuple[LayerLoad, ...] = Field(default=(), description="one of eight layers, steps in EP only")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for index, (earlier, later) in enumerate(pairwise(self.samples), start=1):
            if later.t_s < earlier.t_s or later.tokens < earlier.tokens:
                raise ValueError(
                    f"sample {index} of step {self.step} goes back: t_s {earlier.t_s} -> {later.t_s}, "
                    f"tokens {earlier.tokens} -> {later.tokens}; samples must be in order of time"
                )
        if self.idle_rank_steps > self.rank_steps:
            raise ValueError(f"idle_rank_steps {self.idle_rank_steps} is more than rank_steps {self.rank_steps}")
        return self


class UpdateRecord(Record):
    """One weight update from tensors."""

    seconds: float = Field(description="from the first tensor to generation being allowed again [s]")
    bytes: NonNegativeInt = Field(description="size of the tensors received [bytes]")
    tensors: NonNegativeInt = Field(description="tensors received")
    layout: LayoutName = Field(description="layout that received them")


class StepReport(Record):
    """One rollout step in numbers: `rollout.phases.step_report` of a `StepTrace` and its responses.

    The burst lasts until the in-flight count falls below T_h for the last time, the tail from there to the end.
    """

    step: int = Field(description="number of the rollout step")
    threshold: NonNegativeInt = Field(description="T_h, where burst and tail part [requests]")
    step_s: float = Field(description="duration of the step [s]")
    burst_s: float = Field(description="duration of the burst [s]")
    tail_s: float = Field(description="duration of the tail [s]")
    tail_share: float = Field(description="tail_s / step_s, 0 for an empty step")
    tokens: NonNegativeInt = Field(description="tokens generated [tokens]")
    tokens_burst: NonNegativeInt = Field(description="tokens generated in the burst [tokens]")
    tokens_tail: NonNegativeInt = Field(description="tokens generated in the tail [tokens]")
    tokens_per_s: float = Field(description="rate over the step, 0 if it took no time [tokens/s]")
    tokens_per_s_burst: float = Field(description="rate in the burst, 0 if it took no time [tokens/s]")
    tokens_per_s_tail: float = Field(description="rate in the tail, 0 if it took no time [tokens/s]")
    responses: NonNegativeInt = Field(description="responses returned")
    longest_response: NonNegativeInt = Field(description="length of the longest response [tokens]")
    switches: NonNegativeInt = Field(description="switches committed")
    refused_switches: NonNegativeInt = Field(description="switches refused")
    inflight_at_switch: NonNegativeInt | None = Field(
        description="requests in flight at the first switch to TP, None without one [requests]"
    )
    switch_ms: tuple[float, ...] = Field(description="duration of each committed switch [ms]")
    switch_ms_total: float = Field(description="sum of switch_ms [ms]")
    switch_ms_decide: float = Field(description="sum of decide_ms over committed switches [ms]")
    switch_ms_metadata: float = Field(description="sum of metadata_ms over committed switches [ms]")
    switch_ms_kv: float = Field(description="sum of kv_ms over committed switches [ms]")
    switch_ms_weights: float = Field(description="sum of weights_ms over committed switches [ms]")
    switch_ms_rest: float = Field(description="sum of rest_ms over committed switches [ms]")
    bytes_moved: NonNegativeInt = Field(description="KV and weights moved by all ranks in committed switches [bytes]")
    idle_rank_share: float = Field(description="share of decode steps times ranks in which the rank had no request")
    layout_at_end: LayoutName | None = Field(description="layout of the last sample, None for an empty step")
    weight_update_s: float = Field(description="weight updates since the report before this one [s]")
    inflight: tuple[tuple[float, int], ...] = Field(
        description="in-flight count over time: (seconds since the step began, requests), at the changes and the end"
    )
    switch_records: tuple[SwitchRecord, ...] = Field(description="all switches, committed and refused, in full")
    declined_switches: NonNegativeInt = Field(
        default=0, description="how often a switch was not expected to earn its cost (SwitchConfig.payoff)"
    )
    estimates: tuple[PayoffEstimate, ...] = Field(
        default=(), description="first and last estimate that spoke against a switch, and one that spoke for it"
    )
    expert_skew: float | None = Field(
        default=None,
        description="tokens routed to the EP rank that got most, over the mean; mean of the layers counted, None "
        "without a step in EP",
    )
    expert_skew_worst: float | None = Field(default=None, description="the same of the most uneven layer")
    expert_load: tuple[LayerLoad, ...] = Field(default=(), description="one of eight layers, steps in EP only")
    restarts: NonNegativeInt = Field(default=0, description="engines started again after a death")
    resumed_requests: NonNegativeInt = Field(
        default=0, description="responses under which an engine died, and which another one ended"
    )
    lost_s: float = Field(default=0.0, description="from deaths of engines to the next one being ready [s]")


RecordT = TypeVar("RecordT", bound=Record)


def to_json_line(record: Record) -> str:
    """The record as one line of JSON, newline included."""
    return record.model_dump_json() + "\n"


def read_json_lines(path: Path, model: type[RecordT]) -> list[RecordT]:
    """The records of a file that `to_json_line` wrote. Raises ValueError naming file and line of a bad one."""
    with path.open(encoding="utf-8") as file:
        return list(_parse(file, path, model))


def _parse(lines: Iterable[str], path: Path, model: type[RecordT]) -> Iterable[RecordT]:
    for number, line in enumerate(lines, start=1):
        try:
            yield model.model_validate_json(line)
        except ValidationError as error:
            raise ValueError(f"{path}, line {number}, is not a {model.__name__}: {_in_short(error)}") from error


def _in_short(error: ValidationError) -> str:
    """One line: the first faults, by field."""
    faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}".removeprefix(": ") for fault in error.errors()]
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    return "; ".join(faults[:3]) + more
