"""Signs of life of an engine's ranks: what each rank shows, and when that means that it is gone. No device, no SGLang.

A rank writes its `RankVitals` in shared memory twice a second (sglang/heartbeat.py); the engine's process reads them
(sglang/watch.py). An entry is written by one process only, and a reader may see a mix of two beats: nothing here
depends on two fields being of the same one.
"""

import ctypes
import multiprocessing
import signal
from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import Any

BEAT_S = 0.5
"""Seconds between two beats."""


class EngineDead(RuntimeError):
    """A process of the engine has ended or does not answer. The engine is gone, with what it held."""


class Activity(IntEnum):
    """What a rank does between two forward steps, or instead of them."""

    SERVING = 0  # requests in flight must get on
    SWITCHING = 1
    UPDATING = 2  # its weights
    PAUSED = 3
    CLOSED = 4  # without a full set of weights, or without its memory


class State(StrEnum):
    """Health of an engine."""

    STARTING = "starting"  # also after a death
    READY = "ready"
    SWITCHING = "switching"
    UPDATING = "updating"
    DEGRADED = "degraded"  # it lives, and cannot generate
    DEAD = "dead"  # for good, or until it is started again


_SHOWS_AS = {
    Activity.SWITCHING: State.SWITCHING,
    Activity.UPDATING: State.UPDATING,
    Activity.CLOSED: State.DEGRADED,
}


class RankVitals(ctypes.Structure):
    """One rank's place in the shared array."""

    _fields_ = (
        ("pid", ctypes.c_int64),
        ("beat_s", ctypes.c_double),  # time.monotonic() of the last beat; 0 before the first
        ("forward_ct", ctypes.c_int64),  # forward steps so far
        ("requests", ctypes.c_int64),  # in flight on this rank
        ("activity", ctypes.c_int64),
        ("ended", ctypes.c_int64),  # 1 once its parent has seen it end
        ("exit_code", ctypes.c_int64),  # as multiprocessing's: minus the signal that ended it
        ("failure", ctypes.c_char * 1000),  # the exception that ended it
    )


def make_vitals(ranks: int) -> Any:
    """An array of RankVitals that new processes inherit. It has no name that another process could open."""
    return multiprocessing.get_context("spawn").RawArray(RankVitals, ranks)


def state_of(vitals: Sequence[RankVitals]) -> State:
    """State of an engine that lives: as of the ranks' last beats, of which each is up to BEAT_S old."""
    activities = [vital.activity for vital in vitals]
    return next((state for activity, state in _SHOWS_AS.items() if activity in activities), State.READY)


def how_it_ended(exit_code: int) -> str:
    """In words, for an error message."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was ended by {signal.Signals(-exit_code).name} (exit code {exit_code})"
    except ValueError:
        return f"was ended by signal {-exit_code} (exit code {exit_code})"


class Judge:
    """Tells from vitals whether a rank is silent or stuck.

    silent_s: seconds without a beat after which a rank counts as stopped. stuck_s: seconds in which requests are in
    flight and forward steps do not get on, without a switch, an update or a pause, after which it counts as stuck.
    now_s: time.monotonic() at the start.
    """

    def __init__(self, ranks: int, silent_s: float, stuck_s: float, now_s: float):
        self._silent_s, self._stuck_s = silent_s, stuck_s
        self._looked_s = self._blind_until_s = now_s
        self._steps = [(-1, now_s)] * ranks  # forward steps, and since when there are as many

    def look(self, vitals: Sequence[RankVitals], now_s: float) -> list[str]:
        """What is wrong with whom; empty if all is well. To be called several times in silent_s."""
        if now_s - self._looked_s > self._silent_s / 2:
            self._blind_until_s = now_s  # this process slept itself, so others may have: their clocks begin anew
            self._steps = [(steps, now_s) for steps, _ in self._steps]
        self._looked_s = now_s
        wrong = []
        for rank, vital in enumerate(vitals):
            silence = now_s - max(vital.beat_s, self._blind_until_s)
            if silence > self._silent_s:
                wrong.append(f"rank {rank} (pid {vital.pid}) has shown no sign of life for {silence:.1f} s")
            steps, since_s = self._steps[rank]
            if vital.forward_ct != steps or not vital.requests or vital.activity != Activity.SERVING:
                self._steps[rank] = (vital.forward_ct, now_s)
            elif now_s - since_s > self._stuck_s:
                wrong.append(
                    f"rank {rank} (pid {vital.pid}) has taken no forward step for {now_s - since_s:.0f} s, with "
                    f"{vital.requests} requests in flight"
                )
        return wrong
