"""TpModelWorker with both layouts: builds the two runners and keeps their weights equal."""

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from sglang.srt.distributed import parallel_state
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.model_runner import _unwrap_tensor
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from moebius_engine.config import SwitchConfig
from moebius_engine.layout import Layout
from moebius_engine.layout.shape import ModelShape
from moebius_engine.memory.arena import Arena
from moebius_engine.memory.exportable import open_memory
from moebius_engine.sglang import shards
from moebius_engine.sglang.layout_state import GlobalState, LayoutState, enter_tp_globals
from moebius_engine.sglang.runner import ArenaRunner, SecondRunner
from moebius_engine.transfer.mover import Mover
from moebius_engine.weights.manifest import is_expert, qwen3_moe_manifest
from moebius_engine.weights.update import WeightSet

log = logging.getLogger(__name__)


class SwitchingWorker(TpModelWorker):
    """Holds the EP and the TP runner of a rank over one arena; the scheduler selects one of them."""

    mover: Mover

    def __init__(self, *args, tp_server_args: ServerArgs, config: SwitchConfig, **kwargs):
        self.tp_server_args, self.config = tp_server_args, config
        self.before_writing: Callable[[], None] = lambda: None  # the scheduler's, before an update's first byte
        super().__init__(*args, **kwargs)

    def _init_model_runner(self) -> None:
        began = time.perf_counter()
        self.shape = ModelShape.from_hf_config(self.model_config.hf_config.to_dict())
        memory = None
        if self.server_args.device == "cuda":
            torch.cuda.set_device(self.gpu_id)
            memory = open_memory(self.gpu_id)
        self.arena = Arena(self.shape, self.tp_size, self.model_config.dtype, self.server_args.device, memory)
        self.weights = WeightSet(qwen3_moe_manifest(self.shape))
        common = {
            "model_config": self.model_config,
            "gpu_id": self.gpu_id,
            "tp_rank": self.tp_rank,
            "tp_size": self.tp_size,
            "pp_rank": 0,
            "pp_size": 1,
            "nccl_port": self.nccl_port,
            "arena": self.arena,
        }
        ep = ArenaRunner(
            mem_fraction_static=self.server_args.mem_fraction_static,
            moe_ep_rank=self.moe_ep_rank,
            moe_ep_size=self.ep_size,
            dp_rank=self.dp_rank,
            server_args=self.server_args,
            **common,
        )
        ep_globals = GlobalState()
        enter_tp_globals(self.tp_server_args)
        tp = SecondRunner(
            mem_fraction_static=self.tp_server_args.mem_fraction_static,
            moe_ep_rank=0,
            moe_ep_size=1,
            dp_rank=None,
            server_args=self.tp_server_args,
            first=ep,
            live=functools.partial(self._with_tp_weights, ep.model),
            **common,
        )
        tp_globals = GlobalState()
        ep_globals.install()
        self._model_runner = ep
        self.layouts = {
            Layout.EP: LayoutState(Layout.EP, ep, self.server_args, ep_globals),
            Layout.TP: LayoutState(Layout.TP, tp, self.tp_server_args, tp_globals),
        }
        log.info(
            "both layouts resident after %.1f s; KV rows %d in EP, %d in TP",
            time.perf_counter() - began,
            self.arena.kv_rows(Layout.EP),
            self.arena.kv_rows(Layout.TP),
        )

    @contextmanager
    def _with_tp_weights(self, full: torch.nn.Module, shard: torch.nn.Module) -> Iterator[None]:
        """TP's graphs are captured over TP's weights: a switch of the weights alone, and back."""
        shards.refresh(full, shard, self.shape)
        # SGLang's own gloo group has a deadline of two hours, whatever dist_timeout is.
        self.host_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.config.timeout_s))
        self.mover = Mover(self.arena, parallel_state.get_tp_group().device_group, self.host_group, self.config)
        self.mover.move_experts(Layout.TP)
        self.mover.finish()
        yield
        self.mover.move_experts(Layout.EP)
        self.mover.finish()

    def update_weights_from_tensor(self, recv_req: UpdateWeightsFromTensorReqInput) -> tuple[bool, str]:
        """Write one bucket of a full update: experts into the live layout, the rest into EP's full copy.

        When the set is complete, TP's shards are cut anew, so both layouts hold the new weights. Returns SGLang's
        (success, message); a refused bucket has written nothing.
        """
        if recv_req.load_format not in (None, "flattened_bucket"):
            return False, f"load_format={recv_req.load_format!r} is not supported: use None or 'flattened_bucket'"
        tensors = self._read_bucket(recv_req)
        try:
            self.weights.check((name, tuple(tensor.shape)) for name, tensor in tensors)
        except ValueError as error:
            return False, str(error)
        if not tensors:
            return True, "empty update: nothing to do"
        self.before_writing()
        names = [name for name, _ in tensors]
        self.weights.begin(names)
        try:
            # Two module trees, one rule each: experts exist once, in the live layout; the rest is full in EP's tree.
            self.model_runner.model.load_weights([pair for pair in tensors if is_expert(pair[0])])
            full = self.layouts[Layout.EP].runner.model
            full.load_weights([pair for pair in tensors if not is_expert(pair[0])])
        except BaseException:
            self.weights.invalidate()
            raise
        if self.weights.arrived(names):
            shards.refresh(full, self.layouts[Layout.TP].runner.model, self.shape)
        # A sender on the same GPU may write its next bucket over this one as soon as it hears that it has arrived.
        torch.get_device_module(self.device).synchronize()
        return True, self.weights.reason or f"weight set {self.weights.version} complete"

    def _read_bucket(self, recv_req: UpdateWeightsFromTensorReqInput) -> list[tuple[str, torch.Tensor]]:
        monkey_patch_torch_reductions()
        sent = MultiprocessingSerializer.deserialize(recv_req.serialized_named_tensors[self.tp_rank])
        if recv_req.load_format == "flattened_bucket":
            bucket = FlattenedTensorBucket(flattened_tensor=sent["flattened_tensor"], metadata=sent["metadata"])
            return list(bucket.reconstruct_tensors())
        device = torch.get_device_module(self.device).current_device()
        return [(name, _unwrap_tensor(tensor, tp_rank=self.tp_rank, device=device)) for name, tensor in sent]
