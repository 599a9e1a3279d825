"""A soak: requests without a pause, and what the mix brings."""

import asyncio
import itertools
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from moebius_engine.config import SwitchConfig
from moebius_engine.switch.faults import Fault
from moebius_engine.vitals import EngineDead
from rollout.actor import RolloutActor
from rollout.recovery.settings import RecoveryConfig
from rollout.soak.counts import Counts
from rollout.soak.mix import Event, Mix

log = logging.getLogger(__name__)

PROMPTS, INFLIGHT, LONGEST = 32, 16, 240  # requests, and tokens of a response
_PAUSE_S = (0.3, 2.0)  # between two events, drawn evenly
SWITCH = SwitchConfig(policy="ep", check_bytes=True, inject_faults=True, timeout_s=30.0, silent_s=5.0)
RECOVERY = RecoveryConfig(max_restarts=1_000_000, backoff_s=0.0)
SERVER = {"max_running_requests": 32, "max_total_tokens": 8192, "context_length": 2048}


class Soak:
    """actor: with SWITCH, RECOVERY and SERVER. weights: the checkpoint's, by name, to update with. mix: what happens.
    tell: called with Counts now and then."""

    def __init__(
        self, actor: RolloutActor, weights: Mapping[str, Any], mix: Mix, seed: int, tell: Callable[[Counts], None]
    ):
        self._actor, self._weights, self._mix, self._tell = actor, weights, mix, tell
        self._random = random.Random(seed)
        self._prompts = [[7 + row, *range(20, 30 + row % 20)] for row in range(PROMPTS)]
        self._expected: list[list[int]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self._live: dict[str, bool] = {}  # whether it was asked to end
        self.counts = Counts()

    async def run(self, minutes: float) -> Counts:
        """Everything that was sent has come back, or is counted as lost, when this returns."""
        undisturbed = await self._actor.generate_batch(self._prompts, sampling=_greedy(LONGEST))
        self._expected = [sample.output_ids for (sample,) in undisturbed]
        end_s = time.monotonic() + 60 * minutes
        await self._actor.begin_step(0)
        sending = asyncio.create_task(self._keep_sending())
        while time.monotonic() < end_s:
            await asyncio.sleep(self._random.uniform(*_PAUSE_S))
            event = self._mix.draw()
            log.info("%s", event)
            await self._happen(event)
            self.counts.restarts = (await self._actor.health())["restarts"]
            self._tell(self.counts)
        sending.cancel()
        await asyncio.gather(*self._tasks)
        return self.counts

    # ---- requests

    async def _keep_sending(self) -> None:
        while True:
            while len(self._tasks) < INFLIGHT:
                task = asyncio.create_task(self._request())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0.05)

    async def _request(self) -> None:
        counts, row = self.counts, self._random.randrange(PROMPTS)
        length, rid = self._random.randint(1, LONGEST), f"soak-{next(self._numbers)}"
        counts.sent += 1
        self._live[rid] = False
        try:
            ((sample,),) = await self._actor.generate_batch(
                [self._prompts[row]], sampling=_greedy(length), request_ids=[rid]
            )
        except Exception:
            log.exception("request %s is lost", rid)
            counts.lost += 1
            return
        finally:
            aborted = self._live.pop(rid)
        counts.resumed += bool(sample.resumed)
        ended_early = sample.finish_reason["type"] == "abort"
        counts.aborted += ended_early
        counts.finished += not ended_early
        counts.compare(sample.output_ids, self._expected[row][:length], complete=not aborted)

    # ---- events

    async def _happen(self, event: Event) -> None:
        try:
            if event.what in ("kill", "stop"):
                await self._signal(event.rank, signal.SIGKILL if event.what == "kill" else signal.SIGSTOP)
                self.counts.faults[event.what] += 1
            elif event.what == "abort":
                await self._abort()
            elif event.what == "update":
                await self._actor.update_weights(self._weights.items(), flush_cache=False)
                self.counts.updates += 1
            elif event.what == "step":
                self.counts.steps += 1
                await self._actor.end_step()
                await self._actor.begin_step(self.counts.steps)
            else:
                await self._switch(event.fault)
        except EngineDead as error:  # it is started again; the requests wait for that
            log.info("%s ended by the engine's death: %s", event.what, error)

    async def _signal(self, rank: int, number: int) -> None:
        pids = (await self._actor.health()).get("pids")
        if pids:
            os.kill(pids[rank], number)

    async def _abort(self) -> None:
        if self._live:
            rid = self._random.choice(list(self._live))
            self._live[rid] = True
            await self._actor.abort([rid])

    async def _switch(self, fault: Fault | None) -> None:
        health = await self._actor.health()
        if "layout" not in health:
            return  # there is no engine just now
        target = "tp" if health["layout"] == "ep" else "ep"
        if fault is not None:
            await self._actor.inject(fault)
            self.counts.faults[f"{fault.kind} at {fault.at}"] += 1
        record = await self._actor.switch(target)
        if record is not None:
            self.counts.switches += record.refused is None
            self.counts.undone += record.refused is not None


def _greedy(tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}
