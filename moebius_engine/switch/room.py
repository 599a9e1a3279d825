"""Whether TP can hold what the EP ranks hold: asked before a switch moves anything."""

from collections.abc import Iterable
from typing import NamedTuple

from moebius_engine.layout.partition import Capacity


class Held(NamedTuple):
    """What one EP rank holds: requests with KV, and the KV rows that they take, those that a half-prefilled one still
    needs included."""

    requests: int
    rows: int


def no_room(everyone: Iterable[Held], capacity: Capacity) -> str | None:
    """Why TP cannot hold the requests of all ranks, or None if it can. everyone: in TP each rank holds them all.

    A prefix that requests of several ranks share counts once for each, and what has come since the ranks told each
    other does not count: the plan itself is exact, and a switch that it does not fit is undone.
    """
    requests, rows = map(sum, zip(*everyone, strict=True))
    if requests <= capacity.requests and rows <= capacity.tokens:
        return None
    return (
        f"{requests} requests with {rows} KV rows do not fit into tp, which holds {capacity.requests} requests and "
        f"{capacity.tokens} rows a rank"
    )
