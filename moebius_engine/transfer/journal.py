"""Which layers a switch has moved: what has to come back if it cannot go on."""

from collections.abc import Sequence

from moebius_engine.transfer.base import LayerMove


class Journal:
    """Of one switch. Kinds are "weights" and "kv"."""

    def __init__(self) -> None:
        self._moved: dict[str, set[int]] = {}

    def write(self, what: str, moves: Sequence[LayerMove]) -> None:
        """These layers have moved, or are on their way."""
        self._moved.setdefault(what, set()).update(move.layer for move in moves)

    def strike(self, what: str, move: LayerMove) -> None:
        """This layer's move does not count: its source is whole."""
        self._moved[what].remove(move.layer)

    def undo(self, what: str, moves: Sequence[LayerMove]) -> list[LayerMove]:
        """Those of `moves`, which lead back, whose layers have moved. They are forgotten here."""
        moved = self._moved.pop(what, set())
        return [move for move in moves if move.layer in moved]

    def holds(self, what: str) -> bool:
        """Whether any layer has moved."""
        return bool(self._moved.get(what))

    def clear(self) -> None:
        self._moved.clear()
