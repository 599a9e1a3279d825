"""Pure arithmetic of the two layouts: who owns which expert slice, head, KV row and slot, and what a switch moves.

Legend, here and wherever tensors are moved: E experts, P ranks, H hidden, I expert intermediate, L layers, T tokens,
K KV heads, D head dimension.
"""

from enum import StrEnum


class Layout(StrEnum):
    """EP: data-parallel attention, whole experts per rank. TP: attention heads and every expert cut across ranks."""

    EP = "ep"
    TP = "tp"


def other(layout: Layout) -> Layout:
    """The layout that `layout` is switched from, or to."""
    return Layout.TP if layout == Layout.EP else Layout.EP
