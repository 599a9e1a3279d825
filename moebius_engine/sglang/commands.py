"""Commands of SwitchingEngine to the schedulers.

They travel as a subclass of SGLang's GetInternalStateReq: that message already reaches every rank in the same step and
its answers already come back as one dict a rank, so no upstream dispatcher needs a hook.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput

from moebius_engine.calibration.store import Calibration
from moebius_engine.config import SwitchConfig
from moebius_engine.layout import Layout
from moebius_engine.sglang import inspection
from moebius_engine.sglang.footprint import footprint
from moebius_engine.sglang.payoff_check import PayoffCheck
from moebius_engine.switch.faults import Fault
from moebius_engine.switch.policy import Policy


@dataclass
class Command(GetInternalStateReq):
    """name: a key of _HANDLERS. arguments: its keyword arguments."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


def handle(scheduler, command: Command) -> GetInternalStateReqOutput:
    """Run a command on this rank, in the same step as on all others."""
    answer = _HANDLERS[command.name](scheduler, **command.arguments)
    return GetInternalStateReqOutput(internal_state={"rank": scheduler.tp_rank, **answer})


def _switch(scheduler, layout: str) -> dict[str, Any]:
    if Layout(layout) == scheduler.layout:
        return {"record": None}
    return {"record": scheduler.switch(Layout(layout), "explicit").model_dump()}


def _begin_step(scheduler, step: int, requests: int | None) -> dict[str, Any]:
    scheduler.trace.begin(step)
    scheduler.expert_load.take()
    if scheduler.payoff_check:
        scheduler.payoff_check.begin_step()
    target = scheduler.switch_policy.begin_step(requests)
    if target is not None and target != scheduler.layout:
        scheduler.switch(target, "step")
    return {"layout": scheduler.layout.value}


def _end_step(scheduler) -> dict[str, Any]:
    return {"trace": scheduler.trace.end(scheduler.expert_load.take()).model_dump()}


def _take_trace(scheduler) -> dict[str, Any]:
    ended = scheduler.trace.end(scheduler.expert_load.take())
    scheduler.trace.begin(ended.step + 1)
    return {"trace": ended.model_dump()}


def _state(scheduler) -> dict[str, Any]:
    return {
        "layout": scheduler.layout.value,
        "inflight": len(scheduler.requests_in_flight()),
        "waiting": len(scheduler.waiting_queue) + len(scheduler.grammar_manager),
        "prefilling": len(scheduler.parked) + (scheduler.chunked_req is not None),
        "paused": scheduler._engine_paused,
        "weights_valid": scheduler.tp_worker.weights.complete,
        "weights_reason": scheduler.tp_worker.weights.reason,
        "released": scheduler.occupation.reason,
        "weight_version": scheduler.tp_worker.weights.version,
        "forward_ct": scheduler.forward_ct,
        "kv_tokens": {layout.value: state.capacity.tokens for layout, state in scheduler.layouts.items()},
        "max_running_requests": scheduler.max_running_requests,
    }


def _set_policy(scheduler, config: SwitchConfig, calibration: Calibration | None) -> dict[str, Any]:
    scheduler.switch_policy = Policy(config)
    scheduler.payoff_check = None
    if config.payoff and calibration is not None and scheduler.tp_rank == 0:
        scheduler.payoff_check = PayoffCheck(scheduler, calibration)
    return {}


def _step_times(scheduler) -> dict[str, Any]:
    return {"seen": scheduler.step_clock.take()}


def _invalidate_weights(scheduler) -> dict[str, Any]:
    scheduler.tp_worker.weights.invalidate()
    return {}


def _release(scheduler, tags: list[str]) -> dict[str, Any]:
    refusal = scheduler.occupation.refusal(tags)
    if not refusal:
        scheduler.occupation.release(tags)
    return {"refused": refusal}


def _resume(scheduler, tags: list[str]) -> dict[str, Any]:
    try:
        scheduler.occupation.resume(tags)
    except MemoryError as error:
        return {"refused": f"no memory for {tags} ({error}): free some on these devices, then resume again"}
    return {"refused": ""}


def _weight_digests(scheduler) -> dict[str, Any]:
    mine = inspection.weight_digests(scheduler.tp_worker.model_runner.model)
    everyone: list[Any] = [None] * scheduler.tp_size
    # Gathered, because in a stock TP engine rank 0 alone can answer.
    dist.all_gather_object(everyone, mine, group=scheduler.tp_cpu_group)
    return {"digests": everyone}


def _addresses(scheduler) -> dict[str, Any]:
    return {"addresses": inspection.addresses(scheduler)}


def _memory(scheduler) -> dict[str, Any]:
    return {"components": footprint(scheduler)}


def _inject(scheduler, fault: Fault) -> dict[str, Any]:
    scheduler.switcher.faults.arm(fault)
    return {}


def answer_static(original, self, recv_req):
    """Hook of a stock scheduler: answer our commands, leave the rest to SGLang."""
    return handle(self, recv_req) if isinstance(recv_req, Command) else original(self, recv_req)


STATIC_COMMANDS = ("weight_digests",)
"""Commands that a stock scheduler answers too."""

_HANDLERS: dict[str, Callable[..., dict[str, Any]]] = {
    "switch": _switch,
    "begin_step": _begin_step,
    "end_step": _end_step,
    "take_trace": _take_trace,
    "state": _state,
    "set_policy": _set_policy,
    "step_times": _step_times,
    "invalidate_weights": _invalidate_weights,
    "release": _release,
    "resume": _resume,
    "weight_digests": _weight_digests,
    "addresses": _addresses,
    "memory": _memory,
    "inject": _inject,
}
