"""Whether a layout can hold the requests that a switch brings."""

from collections.abc import Iterable
from typing import NamedTuple

from moebius_engine.layout import Layout
from moebius_engine.layout.partition import Capacity


class Held(NamedTuple):
    """Requests with KV of one rank, and the KV rows that they take, those that a half-prefilled one still needs
    included."""

    requests: int
    rows: int


def no_room(target: Layout, landing: Iterable[Held], capacity: Capacity) -> str | None:
    """Why a rank of `target`, which holds `capacity`, cannot hold all that is to land on it, or None if it can."""
    requests, rows = map(sum, zip(*landing, strict=True))
    if requests <= capacity.requests and rows <= capacity.tokens:
        return None
    return (
        f"{requests} requests with {rows} KV rows do not fit into {target}, which holds {capacity.requests} requests "
        f"and {capacity.tokens} rows a rank"
    )
