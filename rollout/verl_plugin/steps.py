"""Rollout steps of a server: verl names none, so they are found by what it calls.

A step begins with the first request under new weights (or after a step has ended), and ends when the trainer asks for
its report with nothing in flight, when it aborts all requests, or with the next weight update. Between an abort and the
resumption no request goes on to the engine.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from moebius_engine.telemetry import StepReport, UpdateRecord
from rollout.phases import step_report
from rollout.replay.dump import RequestDump


class Steps:
    """Drives begin_step and end_step of an engine and begin and end of a dump. `engine` has SwitchingEngine's config,
    async_begin_step and async_end_step."""

    def __init__(self, engine: Any, dump: RequestDump | None = None):
        self._dump = dump
        self._engine, self._timeout_s = engine, engine.config.timeout_s
        self._turn = asyncio.Condition()  # one begin or end at a time
        self._paused = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = False
        self._live = 0
        self._lengths: list[int] = []
        self._reports: list[StepReport] = []
        self._updates: list[UpdateRecord] = []

    @asynccontextmanager
    async def request(self, step: Callable[[], int]) -> AsyncIterator[list[int]]:
        """Around one request, which waits while they are paused; the first of a step begins it. Yields where to append
        its response's length [tokens].

        step: says, once nothing is paused, which of the trainer's steps the weights generate for.
        """
        async with self._turn:
            await self._turn.wait_for(lambda: not self._paused)
            if not self._open:
                number = step()
                await self._engine.async_begin_step(number)
                self._open, self._lengths = True, []
                if self._dump is not None:
                    self._dump.begin(number)
            self._live += 1
            self._idle.clear()
        try:
            yield self._lengths
        finally:
            self._live -= 1
            if not self._live:
                self._idle.set()

    async def pause(self) -> None:
        """From now on requests wait. Returns once each of those before is in flight, or has not begun."""
        async with self._turn:
            self._paused = True

    async def resume(self) -> None:
        async with self._turn:
            self._paused = False
            self._turn.notify_all()

    async def end(self, keep: bool = True) -> None:
        """Ends the step, if one is open. keep: whether it is reported; not for what is no training step.

        Raises TimeoutError if a request is still in flight after timeout_s.
        """
        try:
            await asyncio.wait_for(self._idle.wait(), self._timeout_s)
        except TimeoutError as error:
            raise TimeoutError(
                f"the step cannot end: {self._live} requests are in flight after {self._timeout_s} s"
            ) from error
        async with self._turn:
            if not self._open:
                return
            trace = await self._engine.async_end_step()
            self._open = False
            if self._dump is not None:
                self._dump.end()
            if keep:
                self._reports.append(step_report(trace, self._lengths, self._engine.config.high))

    def updated(self, record: UpdateRecord) -> None:
        """A weight update has been taken."""
        self._updates.append(record)

    def take(self) -> tuple[list[StepReport], list[UpdateRecord]]:
        """What has been reported since the last call."""
        taken = self._reports, self._updates
        self._reports, self._updates = [], []
        return taken
