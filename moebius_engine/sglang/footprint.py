"""What the components of a memory budget (memory/budget.py) really take on a rank: the bytes of its tensors."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from moebius_engine.layout import Layout
from moebius_engine.memory.arena import KV, WEIGHTS, Arena
from moebius_engine.memory.budget import GB
from moebius_engine.sglang.shards import EXPERT_PARAMETERS


def footprint(scheduler) -> dict[str, int]:
    """Component key → bytes of this rank, as they are now. Idle, both layouts are as they were at start."""
    worker = scheduler.tp_worker
    trees = {layout: state.runner.model for layout, state in worker.layouts.items()}
    found = {**_arena(worker.arena), **_weights(trees[Layout.EP], trees[Layout.TP])}
    for layout, state in worker.layouts.items():
        pool, future_map = state.runner.token_to_kv_pool, state.scheduler_attributes["future_map"]
        others = [pool.data_ptrs, pool.data_strides, *_expert_location(state)]
        if future_map is not None:
            others.append(future_map.token_ids_buf)
        found |= {
            f"request table.{layout}": _nbytes([state.requests.req_to_token]),
            f"free KV pages.{layout}": _nbytes([state.allocator.free_pages]),
            f"other tables.{layout}": _nbytes(others),
            f"CUDA graphs.{layout}": round(state.runner.graph_mem_usage * 2**30),  # SGLang's, in GiB
        }
    found["switch scratch.tp"] = scheduler.switcher.scratch.nbytes
    scratch = list(_tensors(worker.mover.transfer))
    found["transfer scratch.tp"] = _nbytes(tensor for tensor in scratch if not tensor.is_pinned())
    if worker.arena.memory is not None:
        found["transfer tables (host).tp"] = _nbytes(tensor for tensor in scratch if tensor.is_pinned())
        segments = worker.arena.memory.table
        found["transfer scratch.tp"] += sum(s.nbytes for s in segments if s.tag not in (WEIGHTS, KV))
    return found


def describe(found: dict[str, int]) -> str:
    """Lines for a log, in GB of 10^9 bytes."""
    return "\n".join(f"  {key:28}{nbytes / GB:12.6f} GB" for key, nbytes in found.items())


def _arena(arena: Arena) -> dict[str, int]:
    """What the arena has allocated: the spare slot apart, rounding with the other L."""
    parts = {
        ("experts.both", "spare expert slot.tp"): arena.experts,
        ("KV cache.both", "spare KV slot.tp"): arena.kv,
    }
    found = {}
    for (layers, spare), views in parts.items():
        first, second = views(Layout.TP, 0), views(Layout.EP, 0)  # slots 0 and 1
        slot = sum(b.data_ptr() - a.data_ptr() for a, b in zip(first, second, strict=True))
        if arena.memory is None:
            allocated = sum(view.untyped_storage().nbytes() for view in first)
        else:
            allocated = sum(arena.memory.segment_of(view.data_ptr()).nbytes for view in first)
        found[spare], found[layers] = slot, allocated - slot
    return found


def _weights(full: torch.nn.Module, shard: torch.nn.Module) -> dict[str, int]:
    """What is not an expert. Raises RuntimeError for a tensor that no component of the budget stands for."""
    groups: dict[str, list[torch.Tensor]] = {"rotary table.both": [*full.buffers(), *shard.buffers()]}
    shards = dict(shard.named_parameters())
    for name, parameter in full.named_parameters():
        if name.endswith(EXPERT_PARAMETERS):
            continue
        if shards[name].data_ptr() == parameter.data_ptr():
            groups.setdefault("norms, router, head.both", []).append(parameter)
        elif ".self_attn." in name or "embed_tokens" in name:
            component = "attention" if ".self_attn." in name else "embedding"
            groups.setdefault(f"{component}.ep", []).append(parameter)
            groups.setdefault(f"{component}.tp", []).append(shards[name])
        else:
            raise RuntimeError(f"no component of the budget stands for {name} {tuple(parameter.shape)}")
    return {key: _nbytes(tensors) for key, tensors in groups.items()}


def _expert_location(state) -> list[torch.Tensor]:
    """SGLang's tables of where experts lie, on the device."""
    metadata = state.globals.value("sglang.srt.eplb.expert_location", "_global_expert_location_metadata")
    tensors = {name: value for name, value in vars(metadata).items() if isinstance(value, torch.Tensor)}
    return [tensor for name, tensor in tensors.items() if not name.endswith("_cpu")]


def _tensors(thing: Any) -> Iterator[torch.Tensor]:
    """Tensors that a transfer holds."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict | list | tuple):
        for part in thing.values() if isinstance(thing, dict) else thing:
            yield from _tensors(part)
    elif type(thing).__module__.startswith("moebius_engine.transfer."):
        for part in vars(thing).values():
            yield from _tensors(part)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors, each piece of memory once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
