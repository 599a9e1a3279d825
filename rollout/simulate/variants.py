"""Ideas of others about a switch, each at its best: as the step times that it would have.

They stem from a critical reading of arXiv 2606.26607.
"""

from dataclasses import dataclass

from moebius_engine.layout import Layout
from rollout.simulate.replica import EngineTimes


@dataclass(frozen=True)
class PartialLayers:
    """TP for a share of the layers only; the others stay in EP.

    A step costs the shares' mean, and a switch the share of its bytes. What it costs to change between data-parallel
    and tensor-parallel attention in the middle of the model is left out.
    """

    times: EngineTimes
    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share} of the layers: above 0, at most 1")

    def step_s(self, layout: Layout, requests: float, context: float) -> float:
        ep = self.times.step_s(Layout.EP, requests, context)
        if layout == Layout.EP:
            return ep
        return ep + self.share * (self.times.step_s(Layout.TP, requests, context) - ep)

    def prefill_s(self, layout: Layout, tokens: float, requests: int = 1) -> float:
        ep = self.times.prefill_s(Layout.EP, tokens, requests)
        if layout == Layout.EP:
            return ep
        return ep + self.share * (self.times.prefill_s(Layout.TP, tokens, requests) - ep)

    def switch_s(self, target: Layout, requests: int, kv_tokens: float) -> float:
        return self.share * self.times.switch_s(target, requests, kv_tokens)


@dataclass(frozen=True)
class LazyKv:
    """KV moves while the first step after a switch computes, instead of before it.

    That step's attention reads all KV, so no more than one step's time can be hidden.
    """

    times: EngineTimes

    def step_s(self, layout: Layout, requests: float, context: float) -> float:
        return self.times.step_s(layout, requests, context)

    def prefill_s(self, layout: Layout, tokens: float, requests: int = 1) -> float:
        return self.times.prefill_s(layout, tokens, requests)

    def switch_s(self, target: Layout, requests: int, kv_tokens: float) -> float:
        without_kv = self.times.switch_s(target, requests, 0.0)
        if not requests:
            return without_kv
        kv_s = self.times.switch_s(target, requests, kv_tokens) - without_kv
        return without_kv + max(0.0, kv_s - self.times.step_s(target, requests, max(1.0, kv_tokens / requests)))
