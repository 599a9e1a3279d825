"""The paper's published numbers (arXiv 2606.26607, Qwen3-235B-A22B on 8 H200): a fit to three, predictions of others.

Fitted are the crossing of figure 2 and the two TPOTs of the quiet period (section 6.2), nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from moebius_engine.costmodel.costs import CostModel
from moebius_engine.costmodel.fit import FREE, Fit, Observation, fit
from moebius_engine.costmodel.hardware import Achieved, Cluster
from moebius_engine.costmodel.moe import MoeModel
from moebius_engine.costmodel.switching import IN_A_ROW
from moebius_engine.layout import Layout
from moebius_engine.memory.budget import Budget, budget, tokens_that_fit
from moebius_engine.memory.presets import PRESETS

MODEL, GPU, RANKS = "Qwen3-235B-A22B", "H200", 8  # section 6.1
CROSSING = 256  # section 2.1: "between B=128 and B=256"; section 6.1 switches at 256
QUIET_TPOT_S = {Layout.TP: 37e-3, Layout.EP: 52e-3}  # section 6.2
QUIET_REQUESTS_PER_S = 3.0  # section 6.2: 1 to 5; the mean is our assumption
PROMPT, RESPONSE = 500, 1000  # section 6.2: prompts of 300 to 700, outputs of 800 to 1,200 tokens
SWEEP_CONTEXT = 500  # of figure 2, our assumption: its 2,048 requests fit into TP's KV up to 600 tokens each
SMALL, LARGE, ADVANTAGE = 8, 2048, 1.5  # section 2.1: TP wins by 1.5 at small batches, EP by 1.5 at large ones
SWITCH_S = (0.215, 0.434)  # section 6.4
WEIGHTS_S = 0.152  # section 6.4
KERNELS = 0.735  # of the link: section 6.4's kernels sustain 70 % and more, and copies by SMs topped out at 77 %
THRESHOLDS = (0.8 * 256, 256)  # section 6.1
MEM_FRACTION = 0.85  # section 6.1
OVERHEAD = 0.024  # section 6.6


@dataclass(frozen=True)
class Comparison:
    """figure: what and where in the paper. fitted: whether the prediction was fitted to this number."""

    figure: str
    paper: float
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.paper - 1


def tpot_s(costs: CostModel, layout: Layout) -> float:
    """Time per output token in the quiet period of the serving trace.

    By Little's law rate · RESPONSE · TPOT requests are decoding, taken at the published TPOT. Each has its prompt and
    half of its response as KV. Decoding stands still while a request that has arrived is prefilled, so of each second
    1 - rate · prefill is left for decode steps.
    """
    requests = QUIET_REQUESTS_PER_S * RESPONSE * QUIET_TPOT_S[layout]
    step = costs.step_s(layout, requests, PROMPT + RESPONSE / 2)
    return step / (1 - QUIET_REQUESTS_PER_S * costs.prefill_s(layout, PROMPT))


def advantage(costs: CostModel, requests: float) -> float:
    """How many times faster TP's step is than EP's, in the sweep of figure 2."""
    ep, tp = (costs.step_s(layout, requests, SWEEP_CONTEXT) for layout in (Layout.EP, Layout.TP))
    return ep / tp


def _tpot_of(layout: Layout) -> Callable[[CostModel], float]:
    return lambda costs: tpot_s(costs, layout)


def _machine() -> Cluster:
    """The paper's, with the share of NVLink that its kernels reach in a switch."""
    cluster = Cluster.of(GPU, RANKS)
    link = replace(cluster.gpu.nvlink, direct=KERNELS)
    return replace(cluster, gpu=replace(cluster.gpu, nvlink=link))


@cache
def paper_fit() -> Fit:
    """The cost model of the paper's machine."""
    start = Achieved(**{name: begin for name, (_, _, begin) in FREE.items()})
    # How the paper's engine orders a switch is not published: one thing after the other is our assumption.
    costs = CostModel(MoeModel.from_hf_config(PRESETS[MODEL]), _machine(), start, control=IN_A_ROW)
    observed = [
        Observation(f"TPOT of {layout.upper()} in the quiet period [s], section 6.2", seconds, _tpot_of(layout))
        for layout, seconds in QUIET_TPOT_S.items()
    ]
    observed.append(Observation("EP over TP at 256 requests, figure 2", 1.0, lambda made: advantage(made, CROSSING)))
    return fit(costs, observed)


def comparisons(made: Fit | None = None) -> list[Comparison]:
    """The fitted numbers, and predictions of the step times' ratios, of the range of a switch, and of the memory."""
    made = made or paper_fit()
    costs = made.costs
    light, heavy = switch_range_s(costs)
    weights = costs.switch_parts(Layout.TP, 0, 0).weights
    return [
        *(Comparison(r.name, r.measured, r.predicted, True) for r in made.residuals),
        Comparison("TP's advantage at 8 requests, figure 2", ADVANTAGE, advantage(costs, SMALL), False),
        Comparison("EP's advantage at 2,048 requests, figure 2", ADVANTAGE, 1 / advantage(costs, LARGE), False),
        Comparison("weights of a switch [s], section 6.4", WEIGHTS_S, weights, False),
        Comparison("shortest switch [s], section 6.4", SWITCH_S[0], light, False),
        Comparison("longest switch [s], section 6.4", SWITCH_S[1], heavy, False),
        Comparison("memory overhead, section 6.6", OVERHEAD, memory_overhead(), False),
    ]


def switch_range_s(costs: CostModel) -> tuple[float, float]:
    """A switch to TP in serving, at the lower threshold with half-done responses; and one with TP's KV full, at the
    upper threshold ("even with the cache full", section 6.4)."""
    low, high = (round(threshold) for threshold in THRESHOLDS)
    light = costs.switch_s(Layout.TP, low, low * (PROMPT + RESPONSE / 2))
    return light, costs.switch_s(Layout.TP, high, _budget().tp_tokens)


def memory_overhead() -> float:
    """What holding TP beside EP costs, as a share of the memory for weights and KV (0.85 of a GPU).

    Counted as the paper counts it (appendix C): TP's attention shards and one spare layer. Its 1.1 GiB for the layer
    are two of our slots, one to write into and one to stage, as the collective transfer has them.
    """
    parts = {component.key: component.nbytes for component in _budget().components}
    held = parts["attention.tp"] + parts["spare expert slot.tp"] + parts["transfer scratch.tp"]
    return held / (Cluster.of(GPU, RANKS).gpu.memory * MEM_FRACTION)


def _budget() -> Budget:
    costs = paper_fit().costs
    sizes = costs.sizes(LARGE // RANKS, PRESETS[MODEL]["max_position_embeddings"], transfer="collective")
    return budget(replace(sizes, tokens=tokens_that_fit(sizes, costs.cluster.gpu.memory, MEM_FRACTION)))
