"""Where segments lie in one reserved address range: pure arithmetic, the same on every rank."""

from collections.abc import Iterable
from typing import NamedTuple


class Segment(NamedTuple):
    """number: of the segment. tag: what it holds; one tag may have several segments. offset, nbytes: bytes from
    the range's start, and size, both multiples of the granularity."""

    number: int
    tag: str
    offset: int
    nbytes: int


class SegmentTable:
    """Segments one behind the other in a range of `reserved` bytes.

    reserved, granularity: bytes; the driver maps memory in multiples of the granularity.
    """

    def __init__(self, reserved: int, granularity: int):
        self.reserved, self.granularity = reserved, granularity
        self._segments: list[Segment] = []

    def __iter__(self):
        return iter(self._segments)

    @property
    def used(self) -> int:
        """Bytes from the range's start to the end of the last segment."""
        return self._segments[-1].offset + self._segments[-1].nbytes if self._segments else 0

    def add(self, tag: str, nbytes: int) -> Segment:
        """Append a segment of at least `nbytes` bytes.

        Raises ValueError if it is empty or does not fit in the range.
        """
        if nbytes < 1:
            raise ValueError(f"segment {tag!r} of {nbytes} bytes: at least 1")
        size = -(-nbytes // self.granularity) * self.granularity
        if self.used + size > self.reserved:
            raise ValueError(
                f"segment {tag!r} of {size} bytes does not fit: {self.used} of {self.reserved} reserved bytes are used"
            )
        segment = Segment(len(self._segments), tag, self.used, size)
        self._segments.append(segment)
        return segment

    def tagged(self, tags: Iterable[str]) -> list[Segment]:
        """The segments of these tags. Raises ValueError for a tag that no segment has."""
        wanted, known = set(tags), {segment.tag for segment in self._segments}
        if unknown := wanted - known:
            raise ValueError(f"tags {sorted(unknown)} name no segment: there are {sorted(known)}")
        return [segment for segment in self._segments if segment.tag in wanted]

    def at(self, offset: int) -> Segment:
        """The segment that holds the byte at `offset`. Raises ValueError if none does."""
        for segment in self._segments:
            if segment.offset <= offset < segment.offset + segment.nbytes:
                return segment
        raise ValueError(f"offset {offset} lies in no segment: {self.used} bytes are used")
