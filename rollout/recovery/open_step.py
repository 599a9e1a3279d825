"""The rollout step that is under way: its trace lies with an engine, which may die."""

import time

from moebius_engine.telemetry import StepTrace, TraceSample


class OpenStep:
    """number: None before the first step."""

    def __init__(self, number: int | None = None) -> None:
        self.number = number
        self._began_s = time.monotonic()
        self._before: tuple[float, int, int] | None = None  # of the engine that holds the trace now

    def begun_again(self, tokens: int, inflight: int) -> None:
        """The next engine traces it from now on. tokens: generated before and kept. inflight: requests that go on."""
        self._before = (time.monotonic() - self._began_s, tokens, inflight)

    def whole(self, trace: StepTrace) -> StepTrace:
        """The engine's trace, put where it belongs in the step.

        What the dead engine traced is lost: until its successor the count is shown as constant. Its switches are
        missing.
        """
        if self._before is None:
            return trace
        after_s, tokens, inflight = self._before
        layout = trace.samples[0].layout if trace.samples else "ep"
        samples = [TraceSample(t_s=0.0, inflight=inflight, tokens=0, layout=layout)]
        samples += [
            sample.model_copy(update={"t_s": sample.t_s + after_s, "tokens": sample.tokens + tokens})
            for sample in trace.samples
        ]
        switches = [
            switch.model_copy(update={"started_at_s": switch.started_at_s + after_s}) for switch in trace.switches
        ]
        return trace.model_copy(update={"samples": tuple(samples), "switches": tuple(switches)})
