"""The engine's process watches its children: when one is gone, every call of the engine fails with one clear error.

In place of SGLang's SubprocessWatchdog and SIGQUIT handlers, which end the process that holds the engine, too. SGLang's
processes still tell of an exception by a SIGQUIT to their parent. Here it is only heeded by a data-parallel controller,
which ends by it; the engine's process sees that its child has ended.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import psutil
from sglang.srt.managers.tokenizer_manager import SignalHandler
from sglang.srt.utils.watchdog import SubprocessWatchdog

from moebius_engine.vitals import EngineDead, Judge, RankVitals, how_it_ended

log = logging.getLogger(__name__)

END_S = 60.0
"""Seconds that the processes of a dead engine have to end after SIGKILL."""

_POLL_S, _END_POLL_S = 0.25, 0.02
_LET_GO_S = 2.0
_NOWHERE = open(os.devnull, "w")  # noqa: SIM115  # kept: the handler writes to it
_CONSEQUENCES_S = 0.1  # for how long more findings are awaited: the first that is seen need not be the cause

Result = TypeVar("Result")


def outlive_sigquit() -> None:
    """This process outlives the SIGQUIT of a child, whichever thread says so.

    signal.signal wants the main thread, which in a Ray actor is not ours. A process that ignored the signal would start
    children that do; a handler is not inherited.
    """
    faulthandler.register(signal.SIGQUIT, _NOWHERE, all_threads=False)


class OutliveSigquit(SignalHandler):
    """The same once an event loop runs."""

    def running_phase_sigquit_handler(self, signum=None, frame=None):
        pass


def let_go(manager: Any) -> None:
    """End what a TokenizerManager keeps in this process: its tasks, and its sockets, which hold ports.

    ZMQ waits for ever for a socket that is open when its context is collected as garbage.
    """

    closed = threading.Event()

    def close() -> None:
        for part in (*manager.asyncio_tasks, manager.recv_from_detokenizer, manager.send_to_scheduler):
            with contextlib.suppress(RuntimeError):  # its event loop has been closed
                part.cancel() if isinstance(part, asyncio.Task) else part.close(linger=0)
        closed.set()

    loop = manager.event_loop
    if loop is None or not loop.is_running() or asyncio._get_running_loop() is loop:
        close()
    else:
        loop.call_soon_threadsafe(close)
        closed.wait(_LET_GO_S)  # not longer: the loop may be waiting for this thread


class Watch(SubprocessWatchdog):
    """Watches an engine from its start to its shutdown, and knows of every call that waits for it.

    upstream: SGLang's watchdog, stopped. vitals: one a rank. pids: all processes of the engine. manager: its
    TokenizerManager. silent_s, stuck_s: as Judge.
    """

    dead: EngineDead | None = None

    def __init__(
        self,
        upstream: SubprocessWatchdog,
        vitals: Sequence[RankVitals],
        pids: Sequence[int],
        manager: Any,
        silent_s: float,
        stuck_s: float,
    ):
        first = "the data-parallel controller" if manager.server_args.dp_size > 1 else "rank 0"
        names = [first if name == "scheduler_0" else name.replace("scheduler_", "rank ") for name in upstream._names]
        super().__init__(upstream._processes, names, _POLL_S)
        self._children = {process.pid: process for process in self._processes}
        self._vitals, self._manager = vitals, manager
        self._all = {one.pid: one for one in psutil.Process().children(recursive=True) if one.pid in pids}
        self._judge = Judge(len(vitals), silent_s, stuck_s, time.monotonic())
        self._calls: set[asyncio.Future[None]] = set()

    # ---- in the watch's thread

    def _check_processes(self) -> bool:
        """Upstream's loop calls it every _POLL_S, and ends when it is True."""
        findings = self._findings()
        if not findings:
            return False
        time.sleep(_CONSEQUENCES_S)
        self._fail("the engine is dead: " + "; ".join(self._findings() or findings))
        log.error("%s", self.dead)
        try:
            self._end_processes()
        except TimeoutError as error:
            log.error("%s", error)
        return True

    def _findings(self) -> list[str]:
        """Who has ended or does not answer, causes before what may follow from them."""
        killed, failed, vanished = [], [], []
        for rank, vital in enumerate(self._vitals):
            who, child = f"rank {rank} (pid {vital.pid})", self._children.get(vital.pid)
            if vital.failure:
                failed.append(f"{who} failed: {vital.failure.decode(errors='replace')}")
            elif vital.ended:
                killed.append(f"{who} {how_it_ended(vital.exit_code)}")
            elif child is not None and not child.is_alive():
                killed.append(f"{who} {how_it_ended(child.exitcode)}")
            elif child is None and vital.pid and not _runs(self._all.get(vital.pid)):
                vanished.append(f"{who} has ended; its exit code is not known")
        others = [
            f"{name} (pid {process.pid}) {how_it_ended(process.exitcode)}"
            for process, name in zip(self._processes, self._names, strict=True)
            if not process.is_alive()
        ]
        ended = killed + failed or others
        if not killed:
            ended += vanished  # whom a dying controller takes with it, or the cause
        return ended or self._judge.look(self._vitals, time.monotonic())

    # ---- in any thread

    def close(self) -> None:
        """End the engine's processes, and with them the calls that wait. Raises TimeoutError if a process lives on."""
        self.stop()
        if self.dead is None:
            self._fail("the engine has been shut down")
        self._end_processes()

    def _fail(self, message: str) -> None:
        self.dead = EngineDead(message)
        for call in list(self._calls):
            with contextlib.suppress(RuntimeError):  # its loop has been closed
                call.get_loop().call_soon_threadsafe(_finish, call)

    def _end_processes(self) -> None:
        """With SIGKILL, which ends a stopped process too."""
        family = list(self._all.values())
        for process in self._all.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                family += process.children(recursive=True)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        deadline_s = time.monotonic() + END_S
        while left := sorted({process.pid for process in family if _runs(process)}):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"processes {left} of the engine did not end within {END_S} s of SIGKILL")
            time.sleep(_END_POLL_S)

    # ---- in the threads of the callers

    def check(self) -> None:
        """Raise EngineDead if the engine is dead."""
        if self.dead is not None:
            raise EngineDead(*self.dead.args)

    async def until_dead(
        self, answer: Awaitable[Result], timeout_s: float | None = None, what: Callable[[], str] = str
    ) -> Result:
        """Await `answer` while the engine lives.

        Raises EngineDead if the engine dies first, TimeoutError with the text of `what` after timeout_s. The answer is
        then cancelled, and not waited for: what it waits for inside of SGLang may swallow that.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(answer)
        ended: asyncio.Future[None] = loop.create_future()
        task.add_done_callback(lambda _: _finish(ended))
        self._calls.add(ended)  # before the check, so that a death in between is seen by one of both
        try:
            self.check()
            async with asyncio.timeout(timeout_s) as deadline:
                await ended
        except TimeoutError as error:
            if deadline.expired():
                raise TimeoutError(what()) from error
            raise
        finally:
            self._calls.discard(ended)
            if not task.done():
                task.cancel()
        if not task.done():
            self.check()
        return task.result()

    async def wait_dead(self) -> EngineDead:
        """What the engine died of, once it has."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls.add(ended)
        try:
            if self.dead is None:
                await ended
        finally:
            self._calls.discard(ended)
        assert self.dead is not None
        return self.dead

    async def each(self, chunks: AsyncIterator[Result]) -> AsyncIterator[Result]:
        """The chunks of a stream while the engine lives. Raises EngineDead if it dies first."""
        while True:
            try:
                chunk = await self.until_dead(anext(chunks))
            except StopAsyncIteration:
                return
            yield chunk

    def so_far(self, rid: str) -> tuple[list[int], list[float]]:
        """Tokens and logprobs of a request that has not ended, as far as they are here; also after a death.

        A rank reports an unfinished request every 50 tokens (SGLang's SGLANG_FORCE_STREAM_INTERVAL).
        """
        state = self._manager.rid_to_state.get(rid)
        if state is None:
            return [], []
        tokens, logprobs = list(state.output_ids), list(state.output_token_logprobs_val)
        return tokens, logprobs[: len(tokens)]


def _finish(call: "asyncio.Future[None]") -> None:
    if not call.done():
        call.set_result(None)


def _runs(process: psutil.Process | None) -> bool:
    """Whether it has not ended; one that nobody has asked for its exit code has."""
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
