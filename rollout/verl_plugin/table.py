"""What is put into verl: one row a change, checked against the verl that is installed before anything is changed."""

import functools
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from typing import Any


class VerlChanged(RuntimeError):
    """Something in verl is not what the plug-in was written for."""


class Kind(StrEnum):
    CALLS = "calls"  # a registration function of verl, called with `ours`
    ADDS = "adds"  # a dict of verl, which gets `ours`
    WRAPS = "wraps"  # a function of verl, replaced by one that is given the original first
    OVERRIDES = "overrides"  # a method of a class that we subclass: only checked


@dataclass(frozen=True)
class Row:
    """One change.

    target: dotted path in verl. kind: what happens to it. ours: what is put there. parameters: upstream parameter names
    in order, as far as the row relies on them; () for a dict. why: one sentence.
    """

    target: str
    kind: Kind
    ours: Any
    parameters: tuple[str, ...]
    why: str


def check(rows: Sequence[Row]) -> None:
    """Raises VerlChanged, naming the target, if it is missing or takes other parameters."""
    for row in rows:
        owner, name = _owner(row)
        upstream = getattr(owner, name)
        if row.kind == Kind.ADDS:
            if not isinstance(upstream, dict):
                raise _changed(row, f"is a {type(upstream).__name__}, expected a dict")
            continue
        if not callable(upstream):
            raise _changed(row, f"is a {type(upstream).__name__}, expected a function")
        found = tuple(inspect.signature(inspect.unwrap(upstream)).parameters)
        if found[: len(row.parameters)] != row.parameters:
            raise _changed(row, f"takes {found}, expected {row.parameters}")


def apply(rows: Sequence[Row]) -> None:
    """Checks all rows, then makes their changes. Raises VerlChanged before the first change."""
    check(rows)
    for row in rows:
        owner, name = _owner(row)
        upstream = getattr(owner, name)
        match row.kind:
            case Kind.CALLS:
                upstream(*row.ours)
            case Kind.ADDS:
                upstream |= row.ours
            case Kind.WRAPS:
                setattr(owner, name, _wrap(upstream, row.ours))
            case Kind.OVERRIDES:
                pass


def _owner(row: Row) -> tuple[Any, str]:
    path, name = row.target.rsplit(".", 1)
    try:
        owner = pkgutil.resolve_name(path)
        getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise _changed(row, f"does not exist ({error})") from error
    return owner, name


def _wrap(upstream: Callable, ours: Callable) -> Callable:
    @functools.wraps(upstream)
    def wrapped(*args, **kwargs):
        return ours(upstream, *args, **kwargs)

    return wrapped


def _changed(row: Row, reason: str) -> VerlChanged:
    return VerlChanged(f"{row.target} in verl {version('verl')} {reason}; written for verl 0.9.1 ({row.why})")
