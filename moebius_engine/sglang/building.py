"""Hooks that make SGLang put its expert weights and KV pool into the arena while a runner is being built."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from sglang.srt.plugins.hook_registry import HookType

from moebius_engine.layout import Layout
from moebius_engine.memory.arena import Arena
from moebius_engine.sglang.hooks import Hook

_building: ContextVar[tuple[Arena, Layout] | None] = ContextVar("building", default=None)


@contextmanager
def building(arena: Arena, layout: Layout) -> Iterator[None]:
    """Within it, FusedMoE layers and KV pools that SGLang creates are views of `arena` in `layout`."""
    token = _building.set((arena, layout))
    try:
        yield
    finally:
        _building.reset(token)


def create_weights(original, self, layer, num_experts, hidden_size, intermediate_size_per_partition, *args, **kwargs):
    """Let SGLang register its parameters (with their loaders) on no memory, then point them into the arena."""
    target = _building.get()
    if target is None:
        return original(self, layer, num_experts, hidden_size, intermediate_size_per_partition, *args, **kwargs)
    with torch.device("meta"):
        original(self, layer, num_experts, hidden_size, intermediate_size_per_partition, *args, **kwargs)
    arena, layout = target
    for name, view in zip(("w13_weight", "w2_weight"), arena.experts(layout, layer.layer_id), strict=True):
        meta = getattr(layer, name)
        if meta.shape != view.shape or meta.dtype != view.dtype:
            raise RuntimeError(
                f"layer {layer.layer_id} {name}: SGLang wants {tuple(meta.shape)} {meta.dtype}, "
                f"the arena holds {tuple(view.shape)} {view.dtype}"
            )
        parameter = torch.nn.Parameter(view, requires_grad=False)
        parameter.__dict__.update(meta.__dict__)  # weight_loader and its settings
        layer.register_parameter(name, parameter)
    return None


def create_buffers(original, self):
    target = _building.get()
    if target is None:
        return original(self)
    arena, layout = target
    if layout == Layout.EP:
        arena.allocate_kv(self.size + self.page_size, self.store_dtype)
    views = [arena.kv(layout, layer) for layer in range(self.layer_num)]
    self.k_buffer, self.v_buffer = [k for k, _ in views], [v for _, v in views]
    buffers = self.k_buffer + self.v_buffer
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64, device=self.device)
    self.data_ptrs = pointers
    self.k_data_ptrs, self.v_data_ptrs = pointers[: self.layer_num], pointers[self.layer_num :]
    self.data_strides = torch.tensor([b[0].nbytes for b in buffers], device=self.device)
    return None


BUILDING_HOOKS = (
    Hook(
        "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.create_weights",
        HookType.AROUND,
        create_weights,
        ("self", "layer", "num_experts", "hidden_size", "intermediate_size_per_partition"),
        "expert weights of both layouts must lie in the arena from the first byte on: there is no room for a copy",
    ),
    Hook(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers",
        HookType.AROUND,
        create_buffers,
        ("self",),
        "the KV pools of both layouts are views of the arena",
    ),
)
