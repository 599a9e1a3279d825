"""Which of the KV rows taken for a destination's requests is whose.

Every rank computes the same places for every destination from the requests' metadata, so source and destination of
each KV row agree without a message.
"""

from array import array
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from sglang.srt.managers.schedule_batch import Req

from moebius_engine.layout.prefix import shared_prefixes


class Held(NamedTuple):
    """A request with KV. source: the EP rank that owns it, or will. group: equal for requests with the same cached
    prefix, which then need not be compared (requests.prefix_groups)."""

    req: Req
    source: int
    group: Hashable


class Place(NamedTuple):
    """One request's KV at its destination.

    source: the rank that holds it in EP (in TP all do). length: KV tokens. shared: its leading tokens that are
    another request's rows already (`sharer`, an index into the same list), so they are not moved. start: its first own
    row among those that are taken for all places.
    """

    req: Req
    source: int
    length: int
    shared: int
    sharer: int
    start: int

    @property
    def moved(self) -> int:
        """KV tokens that are moved for it."""
        return self.length - self.shared


def plan_places(held: Sequence[Held], page_size: int) -> list[Place]:
    """Order one destination's requests so that shared prefixes are placed once.

    Pure and deterministic: every rank gets the same places.
    """
    # Prefixes are shared only within one namespace (SGLang's extra_key).
    namespaces: dict[str | None, dict[Hashable, list[Held]]] = {}
    for entry in held:
        groups = namespaces.setdefault(entry.req.extra_key, {})
        groups.setdefault(entry.group, []).append(entry)
    places: list[Place] = []
    start = 0
    for groups in namespaces.values():
        members = list(groups.values())
        last: list[int] = []  # place of the last member of each group, in order
        for shared in shared_prefixes([array("I", cached_prefix(group[0].req)) for group in members], page_size):
            common, sharer = shared.shared, last[shared.sharer] if shared.shared else len(places)
            for req, source, _ in members[shared.request]:
                place = Place(req, source, req.kv_committed_len, common, sharer if common else len(places), start)
                places.append(place)
                start += _whole_pages(place.moved, page_size)
                common, sharer = req.cache_protected_len, len(places) - 1
            last.append(len(places) - 1)
    return places


def rows_needed(places: Sequence[Place], page_size: int) -> int:
    """KV rows that the places take, in whole pages."""
    return places[-1].start + _whole_pages(places[-1].moved, page_size) if places else 0


def _whole_pages(rows: int, page_size: int) -> int:
    return -(-rows // page_size) * page_size


class Segment(NamedTuple):
    """Consecutive tokens of one place whose rows stand together. place: its index. position: of the first token.
    start: of its row among those taken for all places. length: tokens."""

    place: int
    position: int
    start: int
    length: int


def segments(places: Sequence[Place]) -> list[Segment]:
    """The rows of every token of every place: its own, and those that it shares, which may lie with several others."""
    own: list[list[Segment]] = []
    for index, place in enumerate(places):
        parts = [
            Segment(index, part.position, part.start, min(part.length, place.shared - part.position))
            for part in (own[place.sharer] if place.shared else ())
            if part.position < place.shared
        ]
        if place.moved:
            parts.append(Segment(index, place.shared, place.start, place.moved))
        own.append(parts)
    return [part for parts in own for part in parts]


def cached_prefix(req: Req) -> list[int]:
    """The tokens whose KV rows the prefix tree owns: only these can be shared between requests."""
    length = req.cache_protected_len
    tokens = req.origin_input_ids[:length]
    return tokens if length <= len(tokens) else tokens + req.output_ids[: length - len(tokens)]
