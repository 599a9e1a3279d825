"""SGLang's control messages, where two layouts change what they do."""

from collections.abc import Iterator
from contextlib import contextmanager

from sglang.srt.managers.io_struct import (
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromDistributedReqOutput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromIPCReqOutput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightsFromTensorReqOutput,
)
from sglang.srt.managers.scheduler import Scheduler

from moebius_engine.sglang import commands
from moebius_engine.sglang.inbox import Inbox
from moebius_engine.sglang.occupation import Occupation, check_tags
from moebius_engine.sglang.roster import read_roster, retract
from moebius_engine.sglang.settle import settle
from moebius_engine.vitals import Activity

_OTHER_UPDATE = "a switching engine takes weights through update_weights_from_tensor only; nothing was written"


class ControlMessages(Scheduler):
    """The part of SwitchingScheduler (scheduler.py) that answers them. All ranks handle one in the same step."""

    inbox: Inbox
    occupation: Occupation
    activity = Activity.SERVING  # told with the heartbeat

    @contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        before, self.activity = self.activity, activity
        try:
            yield
        finally:
            self.activity = before

    @property
    def closed(self) -> str:
        """Why nothing can be generated now; empty if it can."""
        return self.occupation.reason or self.tp_worker.weights.reason

    def get_internal_state(self, recv_req: GetInternalStateReq):
        if isinstance(recv_req, commands.Command):
            return commands.handle(self, recv_req)
        return super().get_internal_state(recv_req)

    def pause_generation(self, recv_req: PauseGenerationReqInput) -> None:
        """As upstream, except that a half-prefilled request stays one: upstream lets it decode unfinished."""
        self._engine_paused = True
        if recv_req.mode == "in_place":
            return
        settle(self)
        if recv_req.mode == "retract":
            retract(self, read_roster(self).held)

    def update_weights_from_tensor(self, recv_req: UpdateWeightsFromTensorReqInput):
        if refusal := self.occupation.update_refusal:
            return UpdateWeightsFromTensorReqOutput(False, refusal)
        if recv_req.flush_cache and (requests := self.requests_on_all_ranks()):
            return UpdateWeightsFromTensorReqOutput(
                False,
                f"flush_cache=True needs an idle engine, {requests} requests are in flight: "
                "abort them, or pass flush_cache=False; nothing was written",
            )
        with self.doing(Activity.UPDATING):
            settle(self)  # a batch of finished requests would keep the cache from being flushed
            return super().update_weights_from_tensor(recv_req)

    def flush_cache_wrapped(self, recv_req: FlushCacheReqInput):
        """At once or not at all: upstream waits until a rank is idle, and ranks that flushed at different times, in EP
        or by clocks of their own, would have different prefixes cached in TP."""
        if recv_req.timeout_s and (requests := self.requests_on_all_ranks()):
            return FlushCacheReqOutput(
                False, f"{requests} requests are in flight, and a switching engine does not wait to flush: abort them"
            )
        return super().flush_cache_wrapped(FlushCacheReqInput())

    def requests_on_all_ranks(self) -> int:
        """Requests in flight, those of this step included. From the headers, so that all ranks answer the same."""
        return self.inbox.inflight() + (0 if self.closed else self.inbox.arriving())

    def release_memory_occupation(self, recv_req: ReleaseMemoryOccupationReqInput):
        self.occupation.release(check_tags(recv_req.tags))
        return ReleaseMemoryOccupationReqOutput()

    def resume_memory_occupation(self, recv_req: ResumeMemoryOccupationReqInput):
        self.occupation.resume(check_tags(recv_req.tags))
        return ResumeMemoryOccupationReqOutput()

    def update_weights_from_disk(self, recv_req: UpdateWeightFromDiskReqInput):
        return UpdateWeightFromDiskReqOutput(False, _OTHER_UPDATE, 0)

    def update_weights_from_distributed(self, recv_req: UpdateWeightsFromDistributedReqInput):
        return UpdateWeightsFromDistributedReqOutput(False, _OTHER_UPDATE)

    def update_weights_from_ipc(self, recv_req: UpdateWeightsFromIPCReqInput):
        return UpdateWeightsFromIPCReqOutput(False, _OTHER_UPDATE)
