"""The arena of one rank: expert weights and KV, allocated once and viewed by both layouts.

Legend: E experts, P ranks, H hidden, I expert intermediate, T KV rows, K KV heads, D head dimension.
"""

import torch

from moebius_engine.layout import Layout
from moebius_engine.layout.heads import kv_heads_per_rank
from moebius_engine.layout.shape import ModelShape
from moebius_engine.layout.slots import slot_of
from moebius_engine.memory.exportable import Memory

WEIGHTS, KV = "weights", "kv"  # tags, for sleep and wake
_SLOT_BYTES = 256  # what a slot's size is a multiple of, so that all layers can be copied in words of 16 bytes


class Arena:
    """One rank's expert weights and KV cache: L + 1 slots each, so that a layer can be resharded into the slot that
    the layer before it has left (layout/slots.py). Addresses never change.

    shape, ranks: the model and P. dtype, device: of the expert weights. KV has its own dtype, given when the KV pool
    is sized. memory: where it all lies, tagged WEIGHTS and KV, at equal offsets on every rank; torch's own allocations
    unless given.
    """

    def __init__(self, shape: ModelShape, ranks: int, dtype: torch.dtype, device: str, memory: Memory | None = None):
        self.shape, self.ranks, self.device, self.memory = shape, ranks, device, memory
        local = shape.experts // ranks
        self._w13 = self._slots(WEIGHTS, local * 2 * shape.intermediate * shape.hidden, dtype)
        self._w2 = self._slots(WEIGHTS, local * shape.hidden * shape.intermediate, dtype)
        self._k: torch.Tensor | None = None
        self._v: torch.Tensor | None = None

    def experts(self, layout: Layout, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one layer's experts.

        Returns: w13_EIH and w2_EHI of this rank: (E/P, 2I, H) and (E/P, H, I) in EP, (E, 2I/P, H) and (E, H, I/P)
        in TP.
        """
        shape, slot = self.shape, slot_of(layout, layer)
        if layout == Layout.EP:
            experts, intermediate = shape.experts // self.ranks, shape.intermediate
        else:
            experts, intermediate = shape.experts, shape.intermediate // self.ranks
        return (
            self._w13[slot].view(experts, 2 * intermediate, shape.hidden),
            self._w2[slot].view(experts, shape.hidden, intermediate),
        )

    def allocate_kv(self, rows: int, dtype: torch.dtype) -> None:
        """Allocate the KV cache once.

        rows: KV rows a layer in EP, the padding page included. Raises RuntimeError if called again.
        """
        if self._k is not None:
            raise RuntimeError("the arena's KV cache is already allocated")
        elements = rows * self.shape.kv_heads * self.shape.head_dim
        self._k, self._v = (self._slots(KV, elements, dtype).zero_() for _ in range(2))

    def kv_rows(self, layout: Layout) -> int:
        """KV rows a layer of this rank: in TP each row holds fewer heads, so that there are more of them."""
        assert self._k is not None, "allocate_kv comes first"
        return self._k.shape[1] // (self._heads(layout) * self.shape.head_dim)

    def kv(self, layout: Layout, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views k_TKD and v_TKD of one layer."""
        assert self._k is not None and self._v is not None, "allocate_kv comes first"
        heads, rows, slot = self._heads(layout), self.kv_rows(layout), slot_of(layout, layer)
        used = rows * heads * self.shape.head_dim
        dims = (rows, heads, self.shape.head_dim)
        return self._k[slot, :used].view(dims), self._v[slot, :used].view(dims)

    def _slots(self, tag: str, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """L + 1 slots of `elements` each."""
        slots = self.shape.layers + 1
        if self.memory is None:
            return torch.empty(slots, elements, dtype=dtype, device=self.device)
        unit = _SLOT_BYTES // dtype.itemsize
        return self.memory.take(tag, (slots, -(-elements // unit) * unit), dtype)[:, :elements]

    def _heads(self, layout: Layout) -> int:
        return self.shape.kv_heads if layout == Layout.EP else kv_heads_per_rank(self.shape.kv_heads, self.ranks)
