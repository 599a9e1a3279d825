"""How evenly EP's ranks are busy: to whose experts tokens are routed.

In EP every rank routes all ranks' tokens (moe_a2a_backend "none"), so that one rank's counts are everyone's.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from sglang.srt.eplb.expert_distribution import ExpertDistributionRecorder

from moebius_engine.telemetry import LayerLoad

EVERY = 8
"""One of so many layers is counted, in every step, also in captured ones: one small kernel for each of them."""


class ExpertLoad(ExpertDistributionRecorder):
    """SGLang's recorder, of which the model tells the layer and the router its choice.

    Rows that pad a captured batch are counted as tokens. layers, experts, ranks: L, E and P.
    """

    def __init__(self, layers: int, experts: int, ranks: int, device: str):
        self._ranks = ranks
        self._counts_LE = torch.zeros(-(-layers // EVERY), experts, dtype=torch.int64, device=device)
        self._layer: int | None = None

    @contextmanager
    def with_current_layer(self, layer_idx: int) -> Iterator[None]:
        before, self._layer = self._layer, layer_idx
        try:
            yield
        finally:
            self._layer = before

    def on_select_experts(self, topk_ids: torch.Tensor) -> None:
        """topk_ids: (tokens, k); -1 where there is no token."""
        if self._layer is not None and self._layer % EVERY == 0:
            chosen = topk_ids.reshape(-1)
            counts_E = self._counts_LE[self._layer // EVERY]
            counts_E.scatter_add_(0, chosen.clamp(min=0).to(torch.int64), (chosen >= 0).to(torch.int64))

    def take(self) -> tuple[LayerLoad, ...]:
        """Of each layer that is counted, since the last call. Waits for the device."""
        counts = self._counts_LE.tolist()
        self._counts_LE.zero_()
        width = self._counts_LE.shape[1] // self._ranks
        return tuple(
            LayerLoad(
                layer=row * EVERY,
                rank_tokens=tuple(sum(of_layer[first : first + width]) for first in range(0, len(of_layer), width)),
            )
            for row, of_layer in enumerate(counts)
            if any(of_layer)
        )
