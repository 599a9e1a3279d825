"""The two model runners of a rank: SGLang's own, with weights and KV in the arena."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.eplb.expert_distribution import set_global_expert_distribution_recorder
from sglang.srt.layers.dp_attention import get_attention_tp_group
from sglang.srt.model_executor import cuda_graph_runner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
from sglang.srt.model_loader.loader import BaseModelLoader, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.utils import get_available_gpu_memory

from moebius_engine.layout import Layout
from moebius_engine.memory.arena import Arena
from moebius_engine.sglang.building import building
from moebius_engine.sglang.expert_load import ExpertLoad
from moebius_engine.sglang.relocation import relocate
from moebius_engine.sglang.shards import shard_bytes, share_equal


class ArenaRunner(ModelRunner):
    """The EP runner: built first, as SGLang builds it, except that experts and KV lie in the arena."""

    layout = Layout.EP

    def __init__(self, *args, arena: Arena, **kwargs):
        self.arena = arena
        with building(arena, self.layout):
            super().__init__(*args, **kwargs)

    def load_model(self) -> None:
        shape = self.arena.shape
        self.expert_load = ExpertLoad(shape.layers, shape.experts, self.arena.ranks, self.device)
        set_global_expert_distribution_recorder(self.expert_load)  # of this layout: LayoutState swaps it
        super().load_model()
        if self.arena.memory is not None:
            relocate(self.model, self.arena.memory)

    def _profile_available_bytes(self, pre_model_load_memory: float) -> int:
        """Without what TP's shards will take, and the KV's spare slot: both are allocated after the pool is sized."""
        shape = self.arena.shape
        shards = shard_bytes(self.model, shape, self.arena.ranks)
        available = super()._profile_available_bytes(pre_model_load_memory) - shards
        return int(available * shape.layers / (shape.layers + 1))


class SecondRunner(ArenaRunner):
    """The TP runner beside it: same process groups, same arena, its own module tree and pools.

    It loads nothing: experts are already in the arena, what both layouts hold alike is shared with `first`, and the
    attention shards are cut from first's full copies (shards.refresh).

    live: given the module tree, a context within which the arena and the tree hold TP's weights.
    """

    layout = Layout.TP

    def __init__(
        self,
        *args,
        arena: Arena,
        first: ArenaRunner,
        live: Callable[[torch.nn.Module], AbstractContextManager[None]],
        **kwargs,
    ):
        self.first, self._live = first, live
        super().__init__(*args, arena=arena, **kwargs)
        self.forward_stream = first.forward_stream

    def init_torch_distributed(self) -> float:
        self.tp_group = parallel_state.get_tp_group()
        self.pp_group = parallel_state.get_pp_group()
        self.attention_tp_group = get_attention_tp_group()
        return get_available_gpu_memory(self.device, self.gpu_id)

    def load_model(self) -> None:
        self.server_args.load_format = EmptyLoader
        ModelRunner.load_model(self)
        self.server_args.load_format = self.first.server_args.load_format
        share_equal(self.first.model, self.model)
        if self.arena.memory is not None:
            relocate(self.model, self.arena.memory, shared_with=self.first.model)

    def init_device_graphs(self) -> None:
        # A graph pool of its own: graphs of one layout must not reuse what the other's hold between replays.
        cuda_graph_runner.set_global_graph_memory_pool(None)
        with self._live(self.model):
            super().init_device_graphs()

    def _resolve_memory_pool_config(self, pre_model_load_memory: float) -> MemoryPoolConfig:
        return MemoryPoolConfig(
            max_total_num_tokens=self.arena.kv_rows(Layout.TP) - self.page_size,
            # Every request that the EP ranks may hold together.
            max_running_requests=self.first.max_running_requests * self.tp_size,
            mem_fraction_static=self.mem_fraction_static,
        )


class EmptyLoader(BaseModelLoader):
    """Creates the module tree and leaves its parameters as they were allocated."""

    def download_model(self, model_config: ModelConfig) -> None:
        pass

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> torch.nn.Module:
        with set_default_torch_dtype(model_config.dtype), torch.device(device_config.device):
            model = _initialize_model(model_config, self.load_config)
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(module)
        return model.eval()
