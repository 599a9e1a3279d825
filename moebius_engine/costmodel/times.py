"""What a source of times answers: the cost model, a calibration, or a table of measurements."""

from typing import Protocol

from moebius_engine.layout import Layout


class StepTimes(Protocol):
    """Times of one engine of P ranks."""

    def step_s(self, layout: Layout, requests: float, context: float) -> float:
        """Seconds of one decode step: every request in flight gets one token.

        requests: in flight over all ranks. context: their mean KV tokens.
        """
        ...

    def switch_s(self, target: Layout, requests: int, kv_tokens: float) -> float:
        """Seconds that decoding stands still for a switch to `target`.

        requests: in flight over all ranks. kv_tokens: what they hold in all.
        """
        ...
