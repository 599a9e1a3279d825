"""When to switch: a pure function of in-flight counts and times that are passed in."""

from collections import deque

from moebius_engine.config import SwitchConfig
from moebius_engine.layout import Layout

RETRY_S = 1.0  # after a refusal: the count must change and this much time must pass


class Policy:
    """Decides on rank 0, once a step.

    rollout: EP until the count falls below the threshold, then TP until the step ends (monotone). The fall counts only
    once the step has been above the threshold, or was announced to stay below it: while a burst is still being
    submitted the count is small too. Without begin_step a step ends when the count has been 0.

    interactive: EP as soon as the count passes Tℎ; TP when the mean of the last W counts is below Tℓ; nothing within C
    seconds of a switch.

    ep, tp: never; a step begins in that layout. No policy asks for a switch while nothing is in flight.
    """

    def __init__(self, config: SwitchConfig):
        self._config = config
        self._counts: deque[int] = deque(maxlen=config.counts)
        self._switched_at = float("-inf")
        self._refused: tuple[float, int] | None = None  # when, at which count
        self._last = 0
        self._armed = False  # the step has reached the threshold, or was announced to stay below it
        self._was_in_ep = False  # with that true; from there the step goes down once

    def begin_step(self, requests: int | None = None) -> Layout | None:
        """A rollout step begins. requests: how many it will have, if known. Returns the layout to begin in."""
        if self._config.policy != "rollout":
            # A weight update or an explicit switch may have left the pinned layout.
            return {"ep": Layout.EP, "tp": Layout.TP}.get(self._config.policy)
        small = requests is not None and requests < self._config.low
        self._armed, self._was_in_ep = small, False
        self._counts.clear()
        self._last = 0
        return Layout.TP if small else Layout.EP

    def observe(self, now_s: float, inflight: int, layout: Layout) -> Layout | None:
        """The layout to switch to, or None. now_s: monotonic seconds. inflight: running and waiting on all ranks."""
        before, self._last = self._last, inflight
        if inflight == 0:
            # What was in flight has ended, and with it the step; before its first request an announcement still holds.
            if before:
                self._armed = self._was_in_ep = False
            self._counts.clear()
            return None
        self._counts.append(inflight)
        wanted = self._wanted(inflight, layout)
        if wanted is None or now_s - self._switched_at < self._config.rest_s or self._held_back(now_s, inflight):
            return None
        return wanted

    def _wanted(self, inflight: int, layout: Layout) -> Layout | None:
        config = self._config
        if config.policy == "rollout":
            burst = inflight >= config.high
            self._armed = self._armed or burst
            if layout == Layout.TP:
                # Not from EP: a new step that nobody announced, or announced too small.
                return Layout.EP if burst and not self._was_in_ep else None
            self._was_in_ep = self._armed
            return Layout.TP if self._armed and self._mean_is_low() else None
        if config.policy == "interactive":
            if layout == Layout.TP:
                return Layout.EP if inflight > config.high else None
            # A burst that has just arrived does not show in the mean yet.
            return Layout.TP if inflight <= config.high and self._mean_is_low() else None
        return None

    def _mean_is_low(self) -> bool:
        """Whether the mean of the last W counts is below Tℓ; False before there are W."""
        return len(self._counts) == self._config.counts and sum(self._counts) / len(self._counts) < self._config.low

    def _held_back(self, now_s: float, inflight: int) -> bool:
        if self._refused is None:
            return False
        when, count = self._refused
        return inflight == count or now_s - when < RETRY_S

    def switched(self, now_s: float) -> None:
        """A switch was committed."""
        self._switched_at = now_s
        self._counts.clear()
        self._refused = None

    def refused(self, now_s: float) -> None:
        """A switch was refused: it is not asked for again until the count has changed and a second has passed."""
        self._refused = (now_s, self._last)
