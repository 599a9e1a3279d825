"""How often the ranks exchange what they received: seldom enough not to slow down short steps."""

_INTERVAL_S = 0.010  # a message waits for one exchange, and may be handled at the next: twice this at most
_MOST = 8  # steps


class Pace:
    """Rank 0 says after each exchange how many steps go by before the next; all ranks count them alike.

    On a GPU a decode step takes a few milliseconds, and an exchange costs a tenth of that.
    """

    def __init__(self) -> None:
        self._left, self._steps, self._since = 0, 0, 0.0

    def is_due(self) -> bool:
        """Whether this step begins with an exchange. Call it once a step."""
        self._steps += 1
        self._left -= 1
        return self._left < 0

    def exchanged(self, skip: int) -> None:
        """An exchange has taken place; `skip` steps go by without one. The same on all ranks."""
        self._left = skip

    def skip(self, now: float, quiet: bool) -> int:
        """Rank 0: steps to go by after the next exchange, by the duration of those since the last call.

        now: seconds. quiet: whether requests are in flight and nothing arrives; otherwise an engine looks at every
        turn, as where one message comes more follow.
        """
        elapsed, steps = now - self._since, self._steps
        self._since, self._steps = now, 0
        if not quiet or not steps:
            return 0
        return min(_MOST, int(_INTERVAL_S * steps / max(elapsed, 1e-6)))
