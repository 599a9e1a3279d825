"""No garbage collection falls into a switch, nor onto its end."""

import gc
from collections.abc import Iterator

import pytest

from moebius_engine.switch.garbage import no_garbage_collection


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generations that were collected meanwhile. Nothing is frozen before or after."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    gc.unfreeze()


class Node:
    """Freed by a collection only."""

    freed = 0

    def __init__(self):
        self.itself = self

    def __del__(self):
        Node.freed += 1


@pytest.fixture(autouse=True)
def none_freed() -> None:
    Node.freed = 0


def rebuild() -> list[list[int]]:
    """More objects than a collection waits for."""
    return [[number] for number in range(20 * gc.get_threshold()[0])]


def test_what_is_rebuilt_is_not_walked_over(collections):
    with no_garbage_collection():
        made = rebuild()
    assert gc.isenabled() and len(made) and not collections
    gc.collect()
    assert collections == [2]


def test_control_without_it_a_collection_runs_over_them(collections):
    gc.disable()
    made = rebuild()
    gc.enable()
    later = [[1] for _ in range(200)]  # too few for a collection of their own
    assert made and later and collections


def test_garbage_made_within_is_found_later(collections):
    with no_garbage_collection():
        Node()
    assert Node.freed == 0
    gc.collect()
    assert Node.freed == 1


def test_what_is_frozen_stays_frozen(collections):
    Node()
    gc.freeze()
    with no_garbage_collection():
        pass
    gc.collect()
    assert Node.freed == 0
    gc.unfreeze()
    gc.collect()
    assert Node.freed == 1


def test_a_collector_that_was_off_stays_off(collections):
    gc.disable()
    try:
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
