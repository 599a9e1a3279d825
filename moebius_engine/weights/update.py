"""Whether the weights may be used: the state of an update that arrives in buckets."""

from collections.abc import Collection, Iterable

from moebius_engine.weights.manifest import Manifest

_NAMED = 3  # names shown in a message


class WeightSet:
    """Tracks one full set of weights.

    complete -- accept(first bucket) --> incomplete -- accept(last missing name) --> complete

    While the set is incomplete the model mixes two versions, so generation must be refused. A failed update stays
    incomplete until every tensor has arrived once since its first byte; sending the full set again heals it.
    """

    def __init__(self, manifest: Manifest):
        self._manifest = manifest
        self._missing: set[str] = set()
        self.version = 0

    @property
    def complete(self) -> bool:
        return not self._missing

    @property
    def reason(self) -> str:
        """Why generation is refused; empty if it is not."""
        if self.complete:
            return ""
        return (
            f"the weights are incomplete: {len(self._missing)} of {len(self._manifest)} tensors have not arrived "
            f"since the update began ({_some(self._missing)}); send the full set"
        )

    def check(self, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """Check a bucket's names and shapes before the first byte is written.

        Raises ValueError naming every kind of fault: an unknown name, a wrong shape, a name twice in one bucket.
        """
        _check_bucket(self._manifest, tensors)

    def begin(self, names: Iterable[str]) -> None:
        """A bucket's first byte is about to be written: until every tensor has arrived, the set is incomplete.

        A name that comes again before the set is complete means that the sender has started anew.
        """
        if self.complete or not self._missing.issuperset(names):
            self._missing = set(self._manifest)

    def arrived(self, names: Iterable[str]) -> bool:
        """Record written tensors. Returns whether the set has become complete."""
        self._missing -= set(names)
        if self.complete:
            self.version += 1
        return self.complete

    def invalidate(self) -> None:
        """Forget what has arrived: the bytes in place are no longer a set (an update that failed half-way)."""
        self._missing = set(self._manifest)


def check_full(manifest: Manifest, tensors: Collection[tuple[str, tuple[int, ...]]]) -> None:
    """Check a whole update before its first byte is sent; an empty one is none.

    Raises ValueError for what WeightSet.check refuses, and for tensors that are missing.
    """
    _check_bucket(manifest, tensors)
    missing = manifest.keys() - {name for name, _ in tensors}
    if tensors and missing:
        raise ValueError(
            f"weight update: {len(missing)} of {len(manifest)} tensors are missing ({_some(missing)}); "
            "nothing was written"
        )


def _check_bucket(manifest: Manifest, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    seen: set[str] = set()
    for name, shape in tensors:
        expected = manifest.get(name)
        if expected is None:
            raise ValueError(f"weight update: unknown tensor {name!r}; nothing was written")
        if tuple(shape) != expected:
            raise ValueError(
                f"weight update: {name} has shape {tuple(shape)}, the model needs {expected}; nothing was written"
            )
        if name in seen:
            raise ValueError(f"weight update: {name} comes twice in one bucket; nothing was written")
        seen.add(name)


def _some(names: set[str]) -> str:
    shown = sorted(names)[:_NAMED]
    return ", ".join(shown) + (", ..." if len(names) > _NAMED else "")
