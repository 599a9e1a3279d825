"""The last complete weight update, kept for an engine that is started again."""

from collections.abc import Iterable, Iterator
from typing import Any

Pair = tuple[str, Any]


class LastWeights:
    """keep: False keeps no copy, and only knows that there was an update."""

    def __init__(self, keep: bool):
        self._keep = keep
        self._updated = False
        self.pairs: list[Pair] | None = None
        """Of the last update, in host memory. None without one: then the checkpoint's weights are the right ones."""

    @property
    def lost(self) -> bool:
        """There was an update, and nothing of it is here."""
        return self._updated and self.pairs is None

    def copying(self, pairs: Iterable[Pair], copies: list[Pair]) -> Iterator[Pair]:
        """Passes the pairs on and puts a copy of each in `copies`: a trainer may write its tensors again."""
        for name, tensor in pairs:
            if self._keep:
                copies.append((name, tensor.detach().to("cpu", copy=True)))
            yield name, tensor

    def complete(self, copies: list[Pair]) -> None:
        """The update that `copies` were made of has arrived as a whole."""
        self._updated = True
        self.pairs = copies if self._keep else None
