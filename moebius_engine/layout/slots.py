"""Which slot of the arena holds which layer: L layers lie in L + 1 slots.

TP layer i is slot i, EP layer i is slot i + 1. Going to TP in the order 0 ... L-1 and back in the order L-1 ... 0, the
slot that is written has always been read before: layer i's target slot is the source slot of the layer before it.
"""

from moebius_engine.layout import Layout


def slot_of(layout: Layout, layer: int) -> int:
    return layer + 1 if layout == Layout.EP else layer


def layer_order(target: Layout, layers: int) -> range:
    """The order in which layers are resharded into `target`."""
    return range(layers) if target == Layout.TP else range(layers - 1, -1, -1)
