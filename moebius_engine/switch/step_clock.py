"""How long decode steps take, as the scheduler's loop sees them."""

from collections import deque

from moebius_engine.layout import Layout

_KEPT = 64  # of the latest steps, for each layout and number of requests

Kind = tuple[Layout, int]


class StepClock:
    """Rank 0 looks at it once a turn of the scheduler's loop; two turns in a row with the same number of decoding
    requests are one decode step apart."""

    def __init__(self) -> None:
        self._steps: dict[Kind, deque[float]] = {}
        self._before: tuple[Kind, float] | None = None

    def turn(self, now_s: float, layout: Layout, decoding: int) -> None:
        """now_s: monotonic seconds. decoding: requests of all ranks that decode, 0 if none do or some are prefilled."""
        kind = (layout, decoding)
        if decoding and self._before is not None and self._before[0] == kind:
            self._steps.setdefault(kind, deque(maxlen=_KEPT)).append(now_s - self._before[1])
        self._before = (kind, now_s) if decoding else None

    def interrupted(self) -> None:
        """The time until the next turn is no step's: a switch, a weight update, a command."""
        self._before = None

    def take(self) -> list[tuple[Layout, int, list[float]]]:
        """What was seen since the last call: layout, requests, seconds of each step."""
        seen = [(*kind, list(steps)) for kind, steps in self._steps.items()]
        self._steps.clear()
        return seen
