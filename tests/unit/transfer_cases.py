"""Models cut for both layouts straight from full tensors, for tests of plans and transfers.

Legend: E experts, P ranks, H hidden, I expert intermediate, L layers, T tokens, K KV heads, D head dimension.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from moebius_engine.layout import Layout
from moebius_engine.layout.plan import RowMove
from moebius_engine.layout.shape import ModelShape

Tensors = dict[str, torch.Tensor]


def model_shape(experts=4, intermediate=4, hidden=3, layers=1, q_heads=4, kv_heads=2, head_dim=2) -> ModelShape:
    return ModelShape("qwen3_moe", layers, hidden, intermediate, experts, q_heads, kv_heads, head_dim, 16)


def other(layout: Layout) -> Layout:
    return Layout.EP if layout == Layout.TP else Layout.TP


@st.composite
def expert_cases(draw) -> tuple[ModelShape, int]:
    ranks = draw(st.integers(2, 4))
    experts, intermediate = ranks * draw(st.integers(1, 3)), ranks * draw(st.integers(1, 3))
    return model_shape(experts, intermediate, hidden=draw(st.integers(1, 4)), layers=draw(st.integers(1, 3))), ranks


def random_experts(shape: ModelShape) -> Tensors:
    """One layer, uncut, every value different."""
    gate_up, down = 2 * shape.intermediate * shape.hidden, shape.hidden * shape.intermediate
    values = torch.randperm(shape.experts * (gate_up + down)).float()
    return {
        "w13": values[: shape.experts * gate_up].view(shape.experts, 2 * shape.intermediate, shape.hidden),
        "w2": values[shape.experts * gate_up :].view(shape.experts, shape.hidden, shape.intermediate),
    }


def cut_experts(full: Tensors, layout: Layout, ranks: int) -> list[Tensors]:
    """What each rank holds, by torch.chunk rather than by the plan's index arithmetic."""
    w13_EIH, w2_EHI = full["w13"], full["w2"]
    if layout == Layout.EP:
        pairs = zip(w13_EIH.chunk(ranks, 0), w2_EHI.chunk(ranks, 0), strict=True)
        return [{"w13": w13.clone(), "w2": w2.clone()} for w13, w2 in pairs]
    gate_EIH, up_EIH = w13_EIH.chunk(2, 1)
    parts = zip(gate_EIH.chunk(ranks, 1), up_EIH.chunk(ranks, 1), w2_EHI.chunk(ranks, 2), strict=True)
    return [{"w13": torch.cat([gate, up], 1), "w2": w2.clone()} for gate, up, w2 in parts]


@dataclass
class KvCase:
    """KV of the tokens of each EP owner: full[name][owner] is (T, K, D); rows are their places in both layouts."""

    shape: ModelShape
    ranks: int
    rows: int  # KV rows of every pool
    full: dict[str, list[torch.Tensor]]
    ep_rows: list[torch.Tensor]
    tp_rows: list[torch.Tensor]

    def moves(self, rank: int | None = None) -> list[RowMove]:
        """As `rank` knows them: EP rows of its own pool only. None: as if one knew all."""
        return [
            RowMove(owner, len(tp), ep if rank in (None, owner) else None, tp)
            for owner, (ep, tp) in enumerate(zip(self.ep_rows, self.tp_rows, strict=True))
        ]

    def pools(self, layout: Layout, filled: bool) -> list[Tensors]:
        """Each rank's k_TKD and v_TKD; -1 where no token is."""
        return [self._pool(layout, rank, filled) for rank in range(self.ranks)]

    def _pool(self, layout: Layout, rank: int, filled: bool) -> Tensors:
        kv_heads = self.shape.kv_heads
        heads = list(range(kv_heads))
        if layout == Layout.TP:
            heads = heads[rank * kv_heads // self.ranks :][: max(1, kv_heads // self.ranks)]
        pool = {name: torch.full((self.rows, len(heads), self.shape.head_dim), -1.0) for name in ("k", "v")}
        owners = (range(self.ranks) if layout == Layout.TP else [rank]) if filled else []
        for owner in owners:
            rows = self.ep_rows[owner] if layout == Layout.EP else self.tp_rows[owner]
            for name in ("k", "v"):
                pool[name][rows] = self.full[name][owner][:, heads]
        return pool


def kv_case(ranks: int, kv_heads: int, head_dim: int, counts: list[int], seed: int) -> KvCase:
    """Tokens at shuffled rows; row 0 is the pools' padding row and stays unused."""
    generator = torch.Generator().manual_seed(seed)
    rows = 1 + sum(counts)

    def places(count: int) -> torch.Tensor:
        return 1 + torch.randperm(rows - 1, generator=generator)[:count]

    tp_rows = places(sum(counts)).split(counts)
    size = sum(counts) * kv_heads * head_dim
    values = torch.randperm(2 * size, generator=generator).float()
    full = {
        name: list(part.view(-1, kv_heads, head_dim).split(counts))
        for name, part in (("k", values[:size]), ("v", values[size:]))
    }
    shape = model_shape(kv_heads=kv_heads, head_dim=head_dim)
    return KvCase(shape, ranks, rows, full, [places(count) for count in counts], list(tp_rows))


@st.composite
def kv_cases(draw) -> KvCase:
    ranks = draw(st.sampled_from([2, 3, 4, 8]))
    kv_heads = draw(st.sampled_from([k for k in (1, 2, 3, 4, 8) if k % ranks == 0 or ranks % k == 0]))
    counts = draw(st.lists(st.integers(0, 7), min_size=ranks, max_size=ranks))
    return kv_case(ranks, kv_heads, draw(st.integers(1, 3)), counts, draw(st.integers(0, 2**31)))
