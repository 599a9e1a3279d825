"""An engine that hands out made-up tokens: the part of SwitchingEngine that RolloutActor calls.

What holds it to the real one is tests/engine/test_actor.py, which checks every call that it answers on a real engine.
"""

import asyncio
import time

from moebius_engine.telemetry import StepTrace, SwitchRecord, TraceSample
from moebius_engine.vitals import State


class StandInEngine:
    """A token a millisecond and request; the tokens depend on the prompt only. Switches once as the policy would."""

    def __init__(self, model_path, ranks, switch, **server_args):
        self.config = switch
        self._policy, self._threshold = switch.policy, switch.high
        self.layout = "tp" if switch.policy == "tp" else "ep"
        self._live: dict[str, asyncio.Event] = {}
        self._step, self.down = 0, False
        self._begin()

    def _begin(self):
        self._began, self._tokens, self._samples, self._switches = time.monotonic(), 0, [], []

    def _sample(self):
        t_s, inflight = time.monotonic() - self._began, len(self._live)
        peak = max((sample.inflight for sample in self._samples), default=0)
        if self._policy == "rollout" and self.layout == "ep" and 0 < inflight < self._threshold <= peak:
            self.layout = "tp"
            counts = {"running": inflight, "waiting": 0, "prefilling": 0, "kv_tokens": 1, "forward_ct": 0}
            times = dict.fromkeys(("decide_ms", "metadata_ms", "kv_ms", "weights_ms", "rest_ms"), 1.0)
            moved = {"total_ms": 5.0, "kv_bytes": 8, "weight_bytes": 8, "started_at_s": t_s, "step": self._step}
            self._switches.append(SwitchRecord(source="ep", target="tp", reason="policy", **counts, **times, **moved))
        self._samples.append(TraceSample(t_s=t_s, inflight=inflight, tokens=self._tokens, layout=self.layout))

    def token(self, prompt, position):
        return (sum(prompt) + 7 * position) % 500

    async def async_generate(self, input_ids, sampling_params, rid, return_logprob):
        if not input_ids:
            return answer([], {"type": "abort", "message": "input_ids is empty", "status_code": 400})
        stopped = self._live[rid] = asyncio.Event()
        self._sample()
        wanted = sampling_params["max_new_tokens"]
        began = time.monotonic()
        try:
            await asyncio.wait_for(stopped.wait(), wanted / 1000)
            count = min(wanted, int(1000 * (time.monotonic() - began)))
            reason = {"type": "abort", "message": "aborted"}
        except TimeoutError:
            count, reason = wanted, {"type": "length", "length": wanted}
        del self._live[rid]
        self._tokens += count
        self._sample()
        return answer([self.token(input_ids, position) for position in range(count)], reason)

    def state(self):
        return State.READY

    async def async_wait_dead(self):
        await asyncio.Event().wait()

    async def async_begin_step(self, step, requests=None):
        self._step = step
        self._begin()

    async def async_end_step(self):
        self._sample()
        return StepTrace(step=self._step, samples=self._samples, switches=self._switches)

    async def async_abort(self, rid="", abort_all=False):
        for name, stopped in self._live.items():
            if abort_all or name == rid:
                stopped.set()

    def shutdown(self):
        self.down = True


def answer(tokens, reason):
    logprobs = [(-1.0, token, None) for token in tokens]
    return {"output_ids": tokens, "meta_info": {"finish_reason": reason, "output_token_logprobs": logprobs}}


class StopsEarly(StandInEngine):
    async def async_generate(self, input_ids, sampling_params, **rest):
        length = sampling_params["max_new_tokens"]
        return await super().async_generate(input_ids, {"max_new_tokens": length - (length > 20)}, **rest)
