"""The cost model of one engine: what `StepTimes` asks, answered from sizes and rates."""

import math
from dataclasses import dataclass, field
from typing import get_args

from moebius_engine.costmodel.decode import Dispatch, StepParts, step_parts
from moebius_engine.costmodel.hardware import Achieved, Cluster
from moebius_engine.costmodel.moe import MoeModel
from moebius_engine.costmodel.switching import Control, SwitchParts, switch_parts
from moebius_engine.layout import Layout
from moebius_engine.layout.shape import check_ranks
from moebius_engine.memory.budget import Sizes


@dataclass(frozen=True)
class CostModel:
    """A `StepTimes`. dispatch, skew: see costmodel.decode. Raises ValueError naming what cannot be."""

    model: MoeModel
    cluster: Cluster
    achieved: Achieved
    dispatch: Dispatch = "deepep"
    skew: float = 1.0
    control: Control = field(default_factory=Control)

    def __post_init__(self) -> None:
        if self.cluster.ranks > 1:
            check_ranks(self.model.shape, self.cluster.ranks)
        if self.dispatch not in get_args(Dispatch):
            raise ValueError(f"dispatch={self.dispatch!r} is unknown: use one of {list(get_args(Dispatch))}")
        if not 1 <= self.skew <= self.cluster.ranks:
            raise ValueError(f"skew={self.skew:g} must lie between 1 and ranks={self.cluster.ranks}")

    def sizes(self, requests: int, positions: int, transfer: str = "direct") -> Sizes:
        """For the memory budget, with one KV token a rank. requests: that a rank holds in EP. positions: the model's,
        and the context."""
        return Sizes(
            shape=self.model.shape,
            ranks=self.cluster.ranks,
            tokens=1,
            requests=requests,
            context=positions,
            positions=positions,
            itemsize=self.model.itemsize,
            kv_itemsize=self.model.itemsize,
            transfer=transfer,
        )

    def step_parts(self, layout: Layout, requests: float, context: float) -> StepParts:
        if requests < 1:
            raise ValueError(f"requests={requests:g} must be at least 1")
        if context < 0:
            raise ValueError(f"context={context:g} must be at least 0")
        return step_parts(
            *(self.model, self.cluster, self.achieved, layout, requests, context),
            dispatch=self.dispatch,
            skew=self.skew,
        )

    def step_s(self, layout: Layout, requests: float, context: float) -> float:
        return self.step_parts(layout, requests, context).total

    def prefill_s(self, layout: Layout, tokens: float, requests: int = 1) -> float:
        """Seconds to prefill requests of equal length that have `tokens` tokens in all. It costs what a decode step of
        as many requests costs, with half of a request's tokens as context; in EP a request's lie on one rank."""
        busiest = tokens / requests * math.ceil(requests / self.cluster.ranks)
        return step_parts(
            *(self.model, self.cluster, self.achieved, layout, tokens, tokens / requests / 2),
            dispatch=self.dispatch,
            skew=self.skew,
            busiest=None if layout == Layout.TP else busiest,
        ).total

    def switch_parts(self, target: Layout, requests: int, kv_tokens: float) -> SwitchParts:
        if requests < 0 or kv_tokens < 0:
            raise ValueError(f"requests={requests} and kv_tokens={kv_tokens:g} must be at least 0")
        return switch_parts(self.model, self.cluster, self.achieved, self.control, target, requests, kv_tokens)

    def switch_s(self, target: Layout, requests: int, kv_tokens: float) -> float:
        return self.switch_parts(target, requests, kv_tokens).total
