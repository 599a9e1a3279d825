"""Many objects' attributes by column: what they have alike travels, and is rebuilt, once.

A switch to TP sends every request to every rank while generation waits, and nearly all of the hundred attributes of a
request are alike from one request to the next.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

_IMMUTABLE = frozenset({int, float, bool, str, type(None)})

State = dict[str, Any]
"""An object's attributes: vars(object)."""


@dataclass(frozen=True)
class Columns:
    """count: objects. same: attributes that are alike, and may be shared between objects. empty: names of those that
    are an empty list in all objects, but one of its own in each. each: the others' values, one an object."""

    count: int
    same: State
    empty: tuple[str, ...]
    each: dict[str, tuple]


def pack(states: Sequence[State], names: Sequence[str]) -> Columns:
    """The named attributes, two or more, of all states. Raises KeyError if a state lacks one."""
    same: State = {}
    empty: list[str] = []
    each: dict[str, tuple] = {}
    for name, values in zip(names, zip(*map(itemgetter(*names), states), strict=True), strict=True):
        first = values[0]
        if first.__class__ in _IMMUTABLE:
            alike = values.count(first) == len(values)
        else:  # an object that all of them share here, such as the model's end tokens
            alike = all(value is first for value in values)
        if alike and not (first.__class__ is list and len(values) == 1):
            same[name] = first
        elif first.__class__ is list and not any(values) and all(value.__class__ is list for value in values):
            empty.append(name)
        else:
            each[name] = values
    return Columns(len(states), same, tuple(empty), each)


def unpack(columns: Columns, template: State) -> list[State]:
    """One state an object: `template`, overwritten by its columns."""
    common = {**template, **columns.same}
    names, empty = tuple(columns.each), columns.empty
    states = [common.copy() for _ in range(columns.count)]
    for state, *values in zip(states, *columns.each.values(), strict=True):
        state.update(zip(names, values, strict=True))
        for name in empty:
            state[name] = []
    return states


def pack_lists(kind: str, lists: Sequence[list | None]) -> tuple[array, array]:
    """Lists of numbers as (length of each, -1 for None; all elements).

    kind: an array type code, "d", or "I" for tokens: Python converts them in a third of the time that it takes for "i".
    Raises OverflowError for a negative token.
    """
    lengths, elements = array("i"), array(kind)
    for part in lists:
        if part is None:
            lengths.append(-1)
        else:
            lengths.append(len(part))
            elements.fromlist(part)
    return lengths, elements


def unpack_lists(packed: tuple[array, array]) -> list[Any]:
    """The lists that pack_lists was given."""
    lengths, elements = packed
    flat, start = elements.tolist(), 0
    lists: list[list | None] = []
    for length in lengths:
        if length < 0:
            lists.append(None)
            continue
        lists.append(flat[start : start + length])
        start += length
    return lists
