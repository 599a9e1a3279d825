"""A rank's signs of life, from within its process and from its parent's."""

import multiprocessing
import multiprocessing.connection
import threading
import time
from collections.abc import Sequence
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from moebius_engine.sglang.hooks import Hook
from moebius_engine.vitals import BEAT_S, Activity, RankVitals

_EXITS_S = 1.0  # how often the controller looks for processes that it has started since


def heartbeat_hooks(vitals: Sequence[RankVitals]) -> tuple[Hook, ...]:
    """vitals: shared with the engine's process, one a rank."""

    def run_event_loop(original, self):
        mine = vitals[self.tp_rank]
        threading.Thread(target=_beat, args=(self, mine), name="heartbeat", daemon=True).start()
        try:
            return original(self)
        except BaseException as error:
            mine.failure = f"{type(error).__name__}: {error}".encode()[:999]
            raise

    return (
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.run_event_loop",
            HookType.AROUND,
            run_event_loop,
            ("self",),
            "a rank that is stopped or fails is noticed by the engine's process, which is not its parent",
        ),
    )


def _beat(scheduler: Any, mine: RankVitals) -> None:
    """Reads the scheduler's state from beside its loop, so that the loop pays nothing."""
    mine.pid = multiprocessing.current_process().pid
    while True:
        mine.forward_ct = scheduler.forward_ct
        mine.requests = _requests(scheduler)
        mine.activity = _activity(scheduler)
        mine.beat_s = time.monotonic()
        time.sleep(BEAT_S)


def _requests(scheduler: Any) -> int:
    """In flight on this rank; those that have finished stay in the batch for a while."""
    running = sum(not req.finished() for req in list(scheduler.running_batch.reqs))
    return running + len(scheduler.waiting_queue) + (scheduler.chunked_req is not None)


def _activity(scheduler: Any) -> Activity:
    """A stock scheduler has no `activity` and is never closed."""
    busy = getattr(scheduler, "activity", Activity.SERVING)
    if busy != Activity.SERVING:
        return busy
    if getattr(scheduler, "closed", ""):
        return Activity.CLOSED
    return Activity.PAUSED if scheduler._engine_paused else Activity.SERVING


def report_exits(vitals: Sequence[RankVitals]) -> None:
    """Write down how each child of this process ends: its exit code is known to its parent alone. Runs for ever."""
    children: dict[Any, Any] = {}
    while True:
        children |= {child.sentinel: child for child in multiprocessing.active_children()}
        if not children:
            time.sleep(_EXITS_S)
        for sentinel in multiprocessing.connection.wait(list(children), _EXITS_S):
            child = children.pop(sentinel)
            child.join(_EXITS_S)
            for vital in vitals:
                if vital.pid == child.pid:
                    vital.exit_code, vital.ended = child.exitcode, 1
