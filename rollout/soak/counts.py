"""What a soak has seen."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Counts:
    """sent: requests. finished: with all their tokens. aborted: that were asked to end, and did with what they had.
    resumed: of both, those that another engine went on with. lost: the rest; must be 0. tokens_compared: with an
    undisturbed run; tokens_differ: of those, must be 0. switches: that were made. undone: refused or rolled back.
    restarts: of the engine. updates: of all weights. faults: by kind.
    """

    sent: int = 0
    finished: int = 0
    aborted: int = 0
    resumed: int = 0
    lost: int = 0
    tokens_compared: int = 0
    tokens_differ: int = 0
    switches: int = 0
    undone: int = 0
    restarts: int = 0
    updates: int = 0
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        return not self.lost and not self.tokens_differ and bool(self.finished)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "faults": dict(sorted(self.faults.items())), "ok": self.ok}

    def compare(self, tokens: list[int], expected: list[int], complete: bool) -> None:
        """tokens: of a response. expected: what an undisturbed run gave. complete: whether all of it must be there."""
        self.tokens_compared += len(tokens)
        self.tokens_differ += sum(one != other for one, other in zip(tokens, expected, strict=False))
        if len(tokens) > len(expected) or (complete and len(tokens) < len(expected)):
            self.lost += 1
