"""Holds the engine, and starts it again when it has died."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from moebius_engine.vitals import EngineDead, RankVitals, State
from rollout.recovery.budget import RestartBudget
from rollout.recovery.losses import Losses
from rollout.recovery.settings import RecoveryConfig

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Keeper:
    """start: starts an engine and returns it, in the time that takes. prepare: brings a new one to where the last one
    was; no request reaches it before. losses: where restarts and the time that they took are counted.

    An engine has SwitchingEngine's async_wait_dead, state, vitals and shutdown.
    """

    def __init__(
        self,
        start: Callable[[], Any],
        prepare: Callable[[Any], Awaitable[None]],
        config: RecoveryConfig,
        losses: Losses,
    ) -> None:
        self._start, self._prepare, self._config, self._losses = start, prepare, config, losses
        self._budget = RestartBudget(config)
        self._engine: Any = start()
        self._prepared = True
        self._reason = ""  # why there will be no engine any more
        self._changed = asyncio.Condition()
        self._follower: asyncio.Task[None] | None = None
        # One thread for the actor's life: SGLang's processes end with the thread that started them (PR_SET_PDEATHSIG).
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-start")
        self.died_of = ""
        """What the last engine that died has died of."""

    def state(self) -> State:
        if self._reason:
            return State.DEAD
        return self._engine.state() if self._usable() else State.STARTING

    @property
    def engine(self) -> Any:
        """The engine, or None while there is none that can be used."""
        return self._engine if self._usable() else None

    def vitals(self) -> Sequence[RankVitals]:
        """Of the engine's ranks; none while there is no engine that can be used."""
        return self._engine.vitals if self._usable() else ()

    async def ready(self, given_up: Callable[[], bool] = bool) -> Any:
        """The engine, once it can be used; None if `given_up` comes true first (call `wake` when it may have).

        Raises EngineDead if there will be none, or none within wait_s.
        """
        self._follow()

        def decided() -> bool:
            return self._usable() or bool(self._reason) or given_up()

        if not decided():
            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait_for(decided), self._config.wait_s)
                except TimeoutError as error:
                    raise EngineDead(f"the engine died and was not back within {self._config.wait_s:g} s") from error
        if given_up():
            return None
        if self._reason:
            raise EngineDead(self._reason)
        return self._engine

    async def run(self, call: Callable[[Any], Awaitable[Result]]) -> Result:
        """Makes a call that may be made again: with the next engine, if one dies under it."""
        while True:
            engine = await self.ready()
            try:
                return await call(engine)
            except EngineDead:
                if engine.state() != State.DEAD:
                    raise

    async def wake(self) -> None:
        """Lets everyone who waits in `ready` look again."""
        async with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the engine, also one that is being started (it waits for that), and starts none any more."""
        self._reason = self._reason or "the engine has been shut down"
        if self._follower is not None:
            self._follower.cancel()
        self._thread.shutdown(wait=True)
        self._engine.shutdown()

    def _usable(self) -> bool:
        return self._prepared and self._engine.state() != State.DEAD

    def _follow(self) -> None:
        """Not in the constructor, which may run outside of an event loop."""
        if self._follower is None or self._follower.done():
            self._follower = asyncio.create_task(self._follow_engines())

    async def _follow_engines(self) -> None:
        try:
            await self._restart_for_ever()
        finally:
            await self.wake()

    async def _restart_for_ever(self) -> None:
        while not self._reason:
            error: BaseException = await self._engine.async_wait_dead()
            died_s, self.died_of = time.monotonic(), str(error)
            while not self._usable() and not self._reason:
                pause_s = self._budget.take(time.monotonic())
                if pause_s is None:
                    limit = f"{self._config.max_restarts} restarts within {self._config.window_s:g} s"
                    self._reason = f"{error}; it is not started again: {limit} are allowed"
                    break
                try:
                    await asyncio.sleep(pause_s)
                    await self._replace()
                except Exception as failure:  # whatever keeps an engine from starting costs one of the restarts
                    log.exception("the engine did not start again")
                    error = EngineDead(f"the engine did not start again: {failure}")
            self._losses.lost_s += time.monotonic() - died_s
            await self.wake()

    async def _replace(self) -> None:
        self._prepared = False
        await asyncio.get_running_loop().run_in_executor(self._thread, self._renew)
        await self._prepare(self._engine)
        self._losses.restarts += 1
        self._prepared = True

    def _renew(self) -> None:
        self._engine.shutdown()
        if not self._reason:
            self._engine = self._start()
