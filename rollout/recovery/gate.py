"""Where requests and weight updates meet: nothing is generated under two sets of weights.

SGLang's own lock is not enough: it lets requests in between two buckets of an update, and whoever waits for it has been
told a version already.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Gate:
    """Requests go through side by side, an update alone."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._turn = asyncio.Lock()  # one update at a time
        self._closed = False
        self._inside = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def request(self, given_up: Callable[[], bool]) -> AsyncIterator[None]:
        """Around one ask of an engine. Waits while an update is due, or until `given_up` comes true (call `wake` when
        it may have): then no engine is to be asked."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed or given_up())
            self._inside += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._idle.set()

    @asynccontextmanager
    async def update(self) -> AsyncIterator[None]:
        """Around a weight update. New requests wait from now on; those inside end first, at the latest when the timeout
        of their batch aborts them."""
        async with self._turn:
            self._closed = True
            try:
                await self._idle.wait()
                yield
            finally:
                self._closed = False
                await self.wake()

    async def wake(self) -> None:
        """Lets the requests that wait look again."""
        async with self._changed:
            self._changed.notify_all()
