"""Device memory given back while nobody generates, and taken again: what a trainer on the same GPUs needs."""

import logging
from collections.abc import Collection

from moebius_engine.layout import Layout
from moebius_engine.memory import arena
from moebius_engine.sglang.settle import settle

log = logging.getLogger(__name__)

TAGS = {"weights": arena.WEIGHTS, "kv_cache": arena.KV}
"""SGLang's tags of what can be given back → ours. Its third, "cuda_graph", is none: graphs stay, and stay valid."""


class Occupation:
    """scheduler: the SwitchingScheduler of this rank. All ranks call the same methods in the same step."""

    def __init__(self, scheduler):
        self._s = scheduler
        self._released: set[str] = set()

    @property
    def reason(self) -> str:
        """Why generation is refused; empty if all memory is there."""
        if not self._released:
            return ""
        return f"the memory of {' and '.join(sorted(self._released))} has been released: resume it first"

    @property
    def update_refusal(self) -> str:
        """Why weights cannot be written; empty if they can. The same on all ranks."""
        if "weights" not in self._released:
            return ""
        return "the memory of weights has been released: resume it before an update; nothing was written"

    def refusal(self, tags: Collection[str]) -> str:
        """Why release(tags) is not possible now; empty if it is. The same on all ranks."""
        memory, inflight = self._s.tp_worker.arena.memory, self._s.requests_on_all_ranks()
        if again := self._released & set(tags):
            return f"the memory of {' and '.join(sorted(again))} has been released already; nothing was released"
        if inflight:
            return f"{inflight} requests are in flight: finish or abort them before {list(tags)} can be released"
        if memory is not None and not memory.can_sleep:
            return f"{list(tags)} cannot be released: the driver has no exportable virtual memory here"
        return ""

    def release(self, tags: Collection[str]) -> None:
        """Give back the memory of these tags (TAGS): content is lost, addresses stay.

        Cached prefixes are dropped. "weights" leaves the engine in EP, and generation is refused until they have been
        resumed and a full set of weights has arrived. Raises RuntimeError if `refusal` has a reason.
        """
        s = self._s
        if refusal := self.refusal(tags):
            raise RuntimeError(refusal)
        settle(s)
        if not s.flush_cache():
            raise RuntimeError("the prefix cache could not be dropped: a batch is still in flight")
        if "weights" in tags:
            if s.layout == Layout.TP and s.tp_worker.weights.complete:
                s.switch(Layout.EP, "step", with_weights=False)
            s.tp_worker.weights.invalidate()
        if s.tp_worker.arena.memory is None:
            log.info("memory of %s is released in name only: it is no CUDA device's", list(tags))
        else:
            s.tp_worker.mover.sleep([TAGS[tag] for tag in tags])
        self._released |= set(tags)

    def resume(self, tags: Collection[str]) -> None:
        """Take memory for these tags again, at the same addresses, of undefined content. Twice is no error.

        Raises MemoryError, on all ranks, if one has no room for it: all stays released, and may be asked for again.
        """
        missing = [tag for tag in tags if tag in self._released]
        if missing and self._s.tp_worker.arena.memory is not None:
            self._s.tp_worker.mover.wake([TAGS[tag] for tag in missing])
        self._released -= set(missing)


def check_tags(tags: Collection[str] | None) -> list[str]:
    """The tags meant: all of TAGS for None. Raises ValueError for an unknown one."""
    if unknown := set(tags or ()) - TAGS.keys():
        raise ValueError(f"tags {sorted(unknown)} are unknown: use some of {list(TAGS)}")
    return list(tags or TAGS)
