"""All requests that clients wait for. In memory: it outlives the engine's processes, not this one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rollout.recovery.promise import Promise


class Journal:
    """on_policy: as RecoveryConfig's. An id can be there twice: a duplicate is the engine's to refuse."""

    def __init__(self, on_policy: bool):
        self._on_policy = on_policy
        self._open: dict[int, Promise] = {}

    @contextmanager
    def promised(self, request_id: str, prompt: Sequence[int], sampling: Mapping[str, Any]) -> Iterator[Promise]:
        """Within it the request is in flight."""
        promise = Promise(request_id, prompt, sampling, self._on_policy)
        self._open[id(promise)] = promise
        try:
            yield promise
        finally:
            del self._open[id(promise)]

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Promise]:
        return iter(list(self._open.values()))

    def tokens(self) -> int:
        """Tokens that engines before this one generated for requests in flight."""
        return sum(len(promise.tokens) for promise in self)
