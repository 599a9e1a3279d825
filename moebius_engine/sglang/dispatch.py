"""Which rank a new request goes to in EP: the one with the fewest requests in flight.

SGLang's controller goes round robin, which does not see that a switch to EP has left one rank longer. Its methods by
load overwrite what they have just sent out by a rank's report from before that arrived. Here a rank also reports how
many requests it has received, so the controller knows how many are under way to it.
"""

from sglang.srt.managers.io_struct import GetLoadsReqOutput
from sglang.srt.plugins.hook_registry import HookType

from moebius_engine.sglang.hooks import Hook

_CONTROLLER = "sglang.srt.managers.data_parallel_controller.DataParallelController."


class Loads:
    """The controller's view: requests in flight by rank."""

    def __init__(self, ranks: int):
        self._sent, self._received, self._held = [0] * ranks, [0] * ranks, [0] * ranks
        self._next = 0  # whose turn it is among equals

    def sent(self, rank: int) -> None:
        self._sent[rank] += 1

    def reported(self, rank: int, held: int, received: int) -> None:
        """held: unfinished requests that the rank has. received: all that have reached it since the start."""
        self._held[rank], self._received[rank] = held, received

    def inflight(self, rank: int) -> int:
        """Requests that the rank has, and those on their way to it."""
        return self._held[rank] + self._sent[rank] - self._received[rank]

    def lightest(self, active: list[bool]) -> int:
        """The rank with the fewest requests; round robin among equals. active: which ranks may be chosen."""
        ranks = len(active)
        turns = ((self._next + turn) % ranks for turn in range(ranks))
        rank = min((rank for rank in turns if active[rank]), key=self.inflight)
        self._next = (rank + 1) % ranks
        return rank


def report_load(loads: GetLoadsReqOutput, held: int, received: int) -> None:
    """Add to a rank's report what `Loads` needs; it goes out with every output."""
    vars(loads).update(requests_held=held, requests_received=received)


def handle_load_update_req(original, self, obj) -> None:
    original(self, obj)
    for load in obj.loads:
        if (held := getattr(load, "requests_held", None)) is not None:  # a stock scheduler does not say
            _loads(self).reported(load.dp_rank, held, load.requests_received)


def round_robin_scheduler(original, self, req) -> None:
    loads = _loads(self)
    if self.maybe_external_dp_rank_routing(req):
        loads.sent(req.routed_dp_rank)
        return
    rank = loads.lightest(self.status)
    loads.sent(rank)
    self.workers[rank].send_pyobj(req)


def _loads(controller) -> Loads:
    return vars(controller).setdefault("_moebius_loads", Loads(len(controller.workers)))


DISPATCH_HOOKS = (
    Hook(
        _CONTROLLER + "handle_load_update_req",
        HookType.AROUND,
        handle_load_update_req,
        ("self", "obj"),
        "the controller must know which rank has how many requests after a switch",
    ),
    Hook(
        _CONTROLLER + "round_robin_scheduler",
        HookType.AROUND,
        round_robin_scheduler,
        ("self", "req"),
        "round robin does not see that a switch to EP has left one rank longer",
    ),
)
