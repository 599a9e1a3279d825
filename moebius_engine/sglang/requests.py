"""Requests between ranks: SGLang's Req objects as small dicts and back."""

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats
from sglang.srt.sampling.sampling_params import SamplingParams

from moebius_engine.sglang.request_fields import CARRIED, KNOWN

_FRESH: dict[str, Any] = vars(Req("", "", [], SamplingParams()))

Packed = dict[str, Any]


def check_known(req: Req) -> None:
    """Raise RuntimeError if SGLang gave the request an attribute that no rule covers: it must not get lost silently."""
    unknown = vars(req).keys() - KNOWN
    if unknown:
        raise RuntimeError(f"request {req.rid} has attributes that no rule of a switch covers: {sorted(unknown)}")


def pack(req: Req) -> Packed:
    """What another rank needs to go on with the request: carried attributes that differ from a fresh request's."""
    check_known(req)
    return {
        name: value
        for name, value in vars(req).items()
        if name in CARRIED and (name not in _FRESH or (_FRESH[name] is not value and _FRESH[name] != value))
    }


def unpack(packed: Packed, tokenizer) -> Req:
    """A request that behaves as the one packed elsewhere, but holds no slot and no node yet."""
    req = Req.__new__(Req)
    state = dict(_FRESH)
    for name, value in state.items():
        if value.__class__ is list:
            state[name] = []
    state.update(packed)
    req.__dict__ = state
    req.tokenizer = tokenizer
    req.time_stats = SchedulerReqTimeStats()
    req.time_stats.set_scheduler_recv_time()
    return req


def forget_place(req: Req) -> None:
    """Drop what ties a request to one layout's pools and prefix tree."""
    req.req_pool_idx = None
    req.prefix_indices = torch.empty(0, dtype=torch.int64)
    req.last_node = req.last_host_node = req.best_match_node = None
    req.cache_protected_len = 0
    req.host_hit_length = 0
