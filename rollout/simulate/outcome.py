"""What happened in a simulated engine."""

from dataclasses import dataclass, field

from moebius_engine.layout import Layout
from moebius_engine.telemetry import PayoffEstimate


@dataclass(frozen=True)
class Switch:
    """A switch that happened: when [s], to what, with how much in flight, and how long decoding stood still [s]."""

    t_s: float
    target: Layout
    inflight: int
    kv_tokens: int
    seconds: float


@dataclass(frozen=True)
class Sample:
    """The engine between two events. clock: decode steps so far."""

    t_s: float
    clock: int
    running: int
    waiting: int
    kv_tokens: int
    layout: Layout


@dataclass
class Run:
    """What happened. first_s, finish_s: when each request's first and last token came, in seconds."""

    first_s: list[float]
    finish_s: list[float]
    seconds: float = 0.0
    tokens: int = 0
    request_steps: int = 0
    refused: int = 0
    retracted: int = 0
    switches: list[Switch] = field(default_factory=list)
    declined: list[PayoffEstimate] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
