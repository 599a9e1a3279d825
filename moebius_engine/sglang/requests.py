"""Requests between ranks: SGLang's Req objects as columns of values and back.

A switch to TP packs and rebuilds every request that another rank owns while generation waits, so this code is written
for speed: attributes are read by itemgetter, sent by column, and token ids travel as int32 arrays.
"""

from array import array
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats
from sglang.srt.sampling.sampling_params import SamplingParams

from moebius_engine.sglang.request_fields import CARRIED, KNOWN, LAZY

_FRESH: dict[str, Any] = vars(Req("", "", [], SamplingParams()))
_TOKENS = ("origin_input_ids", "output_ids")
_NAMES = tuple(sorted(CARRIED - LAZY - {*_TOKENS, "sampling_params", "origin_input_ids_unpadded"}))
_read = itemgetter(*_NAMES)
_CONSTANT, _VARYING = 0, 1

Columns = dict[str, Any]


def check_known(req: Req) -> None:
    """Raise RuntimeError if SGLang gave the request an attribute that no rule covers: it must not get lost silently."""
    if not KNOWN.issuperset(vars(req)):
        unknown = sorted(vars(req).keys() - KNOWN)
        raise RuntimeError(f"request {req.rid} has attributes that no rule of a switch covers: {unknown}")


def pack(reqs: Sequence[Req]) -> Columns:
    """What other ranks need to go on with these requests, by column."""
    for req in reqs:
        check_known(req)
    states = [vars(req) for req in reqs]
    packed: Columns = {
        "count": len(reqs),
        "fields": [_column(values) for values in zip(*map(_read, states), strict=True)],
        "lazy": [{name: state[name] for name in LAZY if name in state} for state in states],
        "sampling": _pack_sampling([vars(req.sampling_params) for req in reqs]),
    }
    for name in _TOKENS:
        lists = [state[name] for state in states]
        flat = array("i")
        for tokens in lists:
            flat.fromlist(tokens)
        packed[name] = (array("i", map(len, lists)), flat)
    return packed


def unpack(packed: Columns, tokenizer) -> list[Req]:
    """Requests that behave as those packed elsewhere, but hold no slot and no node yet."""
    count = packed["count"]
    if not count:
        return []
    fields = zip(*(_values(column, count) for column in packed["fields"]), strict=True)
    inputs, outputs = (_split(*packed[name]) for name in _TOKENS)
    sampling = _unpack_sampling(packed["sampling"], count)
    stats = SchedulerReqTimeStats()
    stats.set_scheduler_recv_time()
    times = vars(stats)
    reqs = []
    for values, lazy, origin, output, params in zip(fields, packed["lazy"], inputs, outputs, sampling, strict=True):
        state = _FRESH.copy()
        state.update(zip(_NAMES, values, strict=True))
        state.update(lazy)
        state.update(
            origin_input_ids=origin,
            origin_input_ids_unpadded=origin,  # they differ for images only, which are refused
            output_ids=output,
            fill_ids=[],
            spec_correct_drafts_histogram=[],
            sampling_params=params,
            tokenizer=tokenizer,
            time_stats=_time_stats(times),
        )
        req = Req.__new__(Req)
        req.__dict__ = state
        reqs.append(req)
    return reqs


def forget_place(req: Req) -> None:
    """Drop what ties a request to one layout's pools and prefix tree."""
    req.req_pool_idx = None
    req.prefix_indices = torch.empty(0, dtype=torch.int64)
    req.last_node = req.last_host_node = req.best_match_node = None
    req.cache_protected_len = 0
    req.host_hit_length = 0


def _time_stats(times: dict[str, Any]) -> SchedulerReqTimeStats:
    stats = SchedulerReqTimeStats.__new__(SchedulerReqTimeStats)
    stats.__dict__ = times.copy()
    return stats


def _column(values: tuple) -> tuple[int, Any]:
    """One attribute of all requests: sent once where they agree on an immutable value."""
    first = values[0]
    if first.__class__ in (int, float, bool, str, type(None)) and values.count(first) == len(values):
        return _CONSTANT, first
    return _VARYING, values


def _values(column: tuple[int, Any], count: int) -> Sequence[Any]:
    kind, content = column
    return (content,) * count if kind == _CONSTANT else content


def _pack_sampling(states: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[int, Any]]] | None:
    """SamplingParams by column. Every one has the same attributes: they are set in its constructor and normalize()."""
    if not states:
        return None
    names = tuple(states[0])
    if any(tuple(state) != names for state in states):
        raise RuntimeError(f"sampling parameters differ in their attributes, expected {names} for all")
    return names, [_column(values) for values in zip(*(tuple(state.values()) for state in states), strict=True)]


def _unpack_sampling(packed, count: int) -> list[SamplingParams]:
    names, columns = packed
    made = []
    for values in zip(*(_values(column, count) for column in columns), strict=True):
        params = SamplingParams.__new__(SamplingParams)
        params.__dict__ = dict(zip(names, values, strict=True))
        made.append(params)
    return made


def _split(lengths: array, tokens: array) -> list[list[int]]:
    flat, lists, start = tokens.tolist(), [], 0
    for length in lengths:
        lists.append(flat[start : start + length])
        start += length
    return lists
