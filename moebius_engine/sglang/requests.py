"""Requests between ranks: SGLang's Req objects as columns of values and back.

A switch to TP packs and rebuilds every request that another rank owns while generation waits, so this code is written
for speed.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats
from sglang.srt.sampling.sampling_params import SamplingParams

from moebius_engine.sglang import columns
from moebius_engine.sglang.columns import Columns
from moebius_engine.sglang.request_fields import CARRIED, KNOWN, LAZY

_FRESH: dict[str, Any] = vars(Req("", "", [], SamplingParams()))
_PROMPT, _OUTPUT = ("origin_input_ids", "origin_input_ids_unpadded"), "output_ids"
_LOGPROBS, _LOGPROB_IDS = "output_token_logprobs_val", "output_token_logprobs_idx"
_LISTS = (*_PROMPT, _OUTPUT, _LOGPROBS, _LOGPROB_IDS)
_NAMES = tuple(sorted(CARRIED - LAZY - {*_LISTS, "sampling_params"}))
_ALWAYS = len(KNOWN - LAZY)


@dataclass(frozen=True)
class Packed:
    """Requests as they travel.

    lazy: attributes that only some of them have, by index. prompts: token ids of each distinct one. prompt: each
    request's, an index. outputs: generated token ids. delivered: how many of their logprobs have been given to the
    client, for good: nobody reads them again, and only the others travel, in logprobs. logprob_ids: the ids that these
    belong to, by index, where they are not simply the output's. queued: when each joined the queue, by which SGLang
    orders those of one priority (seconds, a clock of the host). groups: prefix_groups of the sender.
    """

    fields: Columns
    sampling: Columns
    lazy: dict[int, dict[str, Any]]
    prompts: tuple[array, array]
    prompt: list[int]
    outputs: tuple[array, array]
    delivered: array
    logprobs: tuple[array, array]
    logprob_ids: dict[int, Any]
    queued: array
    groups: list[int]


def check_known(req: Req) -> None:
    """Raise RuntimeError if SGLang gave the request an attribute that no rule covers: it must not get lost silently."""
    if not KNOWN.issuperset(vars(req)):
        unknown = sorted(vars(req).keys() - KNOWN)
        raise RuntimeError(f"request {req.rid} has attributes that no rule of a switch covers: {unknown}")


def prefix_groups(reqs: Sequence[Req]) -> list[int]:
    """A number for each request: equal for two that hold the same prefix, because they hold the same tree node.

    GRPO's samples of one prompt do. Requests of different numbers may still share a prefix.
    """
    numbers: dict[tuple[int, int], int] = {}
    return [
        index if req.last_node is None else numbers.setdefault((id(req.last_node), req.cache_protected_len), index)
        for index, req in enumerate(reqs)
    ]


def pack(reqs: Sequence[Req]) -> Packed | None:
    """What other ranks need to go on with these requests; None for none."""
    if not reqs:
        return None
    states = [vars(req) for req in reqs]
    lazy = {}
    for index, state in enumerate(states):
        if len(state) != _ALWAYS:
            check_known(reqs[index])
            lazy[index] = {name: state[name] for name in LAZY if name in state}
    sampling = [vars(req.sampling_params) for req in reqs]
    names = tuple(sampling[0])
    # Every SamplingParams has the same attributes: they are set in its constructor and in normalize().
    if any(len(state) != len(names) for state in sampling):
        raise RuntimeError(f"sampling parameters differ in their attributes, expected {names} for all")
    groups = prefix_groups(reqs)
    prompt = _first_equal([req.origin_input_ids for req in reqs], groups)
    distinct = sorted(set(prompt))
    places = dict(zip(distinct, range(len(distinct)), strict=True))
    delivered = [_delivered(req) for req in reqs]
    return Packed(
        fields=columns.pack(states, _NAMES),
        sampling=columns.pack(sampling, names),
        lazy=lazy,
        prompts=columns.pack_lists("I", [reqs[index].origin_input_ids for index in distinct]),
        prompt=[places[index] for index in prompt],
        outputs=columns.pack_lists("I", [req.output_ids for req in reqs]),
        delivered=array("i", delivered),
        logprobs=columns.pack_lists(
            "d", [_from(req.output_token_logprobs_val, sent) for req, sent in zip(reqs, delivered, strict=True)]
        ),
        logprob_ids={
            index: req.output_token_logprobs_idx
            for index, (req, sent) in enumerate(zip(reqs, delivered, strict=True))
            if _from(req.output_token_logprobs_idx, sent) != req.output_ids[sent:]
        },
        queued=array("d", [req.time_stats.wait_queue_entry_time for req in reqs]),
        groups=groups,
    )


def unpack(packed: Packed | None, tokenizer) -> list[Req]:
    """Requests that behave as those packed elsewhere, but hold no slot and no node yet."""
    if packed is None:
        return []
    stats = SchedulerReqTimeStats()
    stats.set_scheduler_recv_time()
    times = vars(stats)
    states = columns.unpack(packed.fields, {**_FRESH, "tokenizer": tokenizer})
    sampling = columns.unpack(packed.sampling, {})
    prompts, outputs, logprobs = map(columns.unpack_lists, (packed.prompts, packed.outputs, packed.logprobs))
    rows = zip(states, packed.prompt, outputs, packed.delivered, logprobs, sampling, packed.queued, strict=True)
    for state, prompt, output, sent, logprob, params, queued in rows:
        # The two differ for images only, which are refused.
        state["origin_input_ids"] = state["origin_input_ids_unpadded"] = prompts[prompt].copy()
        state["output_ids"], state["output_token_logprobs_idx"] = output, output.copy()
        state["output_token_logprobs_val"] = [None] * sent + logprob if sent else logprob
        state["fill_ids"], state["spec_correct_drafts_histogram"] = [], []
        state["sampling_params"] = _with_state(SamplingParams, params)
        state["time_stats"] = _with_state(SchedulerReqTimeStats, times | {"wait_queue_entry_time": queued})
    for index, attributes in packed.lazy.items():
        states[index].update(attributes)
    for index, ids in packed.logprob_ids.items():
        states[index]["output_token_logprobs_idx"] = ids
    return [_with_state(Req, state) for state in states]


def _delivered(req: Req) -> int:
    logprobs = req.output_token_logprobs_val
    return 0 if logprobs is None else min(len(logprobs), req.send_output_token_logprobs_offset)


def _from(values: list | None, first: int) -> list | None:
    return values[first:] if values is not None and first else values


def _first_equal(prompts: Sequence[list[int]], groups: Sequence[int]) -> list[int]:
    """For each request its own index, or its group's if that one has the same prompt."""
    return [
        group if prompts[group] == prompt else index
        for index, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
    ]


def forget_place(req: Req) -> None:
    """Drop what ties a request to one layout's pools and prefix tree."""
    req.req_pool_idx = None
    req.prefix_indices = torch.empty(0, dtype=torch.int64)
    req.last_node = req.last_host_node = req.best_match_node = None
    req.cache_protected_len = 0
    req.host_hit_length = 0


def _with_state(kind: Any, state: dict[str, Any]) -> Any:
    made = kind.__new__(kind)
    made.__dict__ = state
    return made
