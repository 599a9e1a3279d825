"""How often an engine may be started again, and how soon."""

from collections import deque

from rollout.recovery.settings import RecoveryConfig


class RestartBudget:
    """At most max_restarts within any window_s, each later than the one before."""

    def __init__(self, config: RecoveryConfig):
        self._config = config
        self._taken_s: deque[float] = deque()

    def take(self, now_s: float) -> float | None:
        """Seconds to wait before a restart, which counts from now on; None if there is none left."""
        while self._taken_s and self._taken_s[0] <= now_s - self._config.window_s:
            self._taken_s.popleft()
        taken = len(self._taken_s)
        if taken >= self._config.max_restarts:
            return None
        self._taken_s.append(now_s)
        return 0.0 if taken == 0 else self._config.backoff_s * 2.0 ** (taken - 1)
