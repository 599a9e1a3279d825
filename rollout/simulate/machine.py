"""The engine that is simulated: its step times from the cost model, its limits from the memory budget."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moebius_engine.costmodel.costs import CostModel
from moebius_engine.layout import Layout
from moebius_engine.layout.heads import kv_heads_per_rank
from moebius_engine.memory.budget import Budget, budget, kv_token_bytes, tokens_that_fit
from rollout.simulate.limits import Limits
from rollout.simulate.replica import EngineTimes

# SGLang's chunked_prefill_size as the paper sets it (arXiv 2606.26607, section 6.1): in TP, and for each rank in EP.
TP_PREFILL, EP_PREFILL = 8192, 4096


@dataclass(frozen=True)
class Machine:
    """One replica of P ranks. switching: limits with both layouts resident. static: those of one layout alone."""

    name: str
    ranks: int
    times: EngineTimes
    switching: Limits
    static: Mapping[Layout, Limits]


def from_costs(name: str, costs: CostModel, positions: int, running: int, mem_fraction: float) -> Machine:
    """positions: the model's longest context. running: requests that the replica decodes at once.

    mem_fraction: SGLang's mem_fraction_static. Raises ValueError, with both numbers, for what does not fit.
    """
    ranks, gpu = costs.cluster.ranks, costs.cluster.gpu
    if running < ranks:
        raise ValueError(f"running={running} requests leave none to each of ranks={ranks}")
    if not 0 < mem_fraction < 1:
        raise ValueError(f"mem_fraction={mem_fraction:g} must lie between 0 and 1")
    sizes = costs.sizes(running // ranks, positions)
    tokens = tokens_that_fit(sizes, gpu.memory, mem_fraction)
    if tokens < 1:
        raise ValueError(
            f"{gpu.memory / 1e9:g} GB at mem_fraction={mem_fraction:g} leave no room for KV beside the weights on each "
            f"of ranks={ranks}; use more ranks"
        )
    made = budget(replace(sizes, tokens=tokens))
    both = {Layout.EP: tokens * ranks, Layout.TP: made.tp_tokens}
    static = {layout: _limits(running, ranks, both | {layout: _alone(made, layout)}) for layout in Layout}
    return Machine(name, ranks, costs, _limits(running, ranks, both), static)


def _limits(running: int, ranks: int, kv_tokens: Mapping[Layout, int]) -> Limits:
    return Limits(running, {Layout.TP: TP_PREFILL, Layout.EP: EP_PREFILL * ranks}, kv_tokens)


def _alone(made: Budget, layout: Layout) -> int:
    """KV tokens of an engine that holds one layout: the other's weights and the spare slots are KV instead."""
    sizes, parts = made.sizes, {component.key: component.nbytes for component in made.components}
    other = "tp" if layout == Layout.EP else "ep"
    room = sum(parts[f"{name}.{other}"] for name in ("attention", "embedding"))
    room += parts["KV cache.both"] + parts["spare KV slot.tp"] + parts["spare expert slot.tp"]
    token = kv_token_bytes(sizes.shape, sizes.kv_itemsize)
    if layout == Layout.EP:
        return room // token * sizes.ranks
    return room * sizes.shape.kv_heads // (token * kv_heads_per_rank(sizes.shape.kv_heads, sizes.ranks))
