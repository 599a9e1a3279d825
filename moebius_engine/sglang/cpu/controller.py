"""SGLang's data-parallel controller where ranks need every core."""

_WATCHDOG_MS = 1000  # how often its watchdog is fed while nothing comes


def event_loop(self) -> None:
    """Upstream's loop, asleep while nothing comes."""
    while True:
        self.soft_watchdog.feed()
        if self.recv_from_tokenizer.poll(_WATCHDOG_MS):
            self._request_dispatcher(self.recv_from_tokenizer.recv_pyobj())
