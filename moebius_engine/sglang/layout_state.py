"""What SGLang keeps for a layout in process globals and on the scheduler, as one object that can be selected."""

import importlib
from typing import Any

from sglang.srt.distributed import parallel_state
from sglang.srt.eplb import expert_location
from sglang.srt.layers import dp_attention
from sglang.srt.layers.moe.utils import initialize_moe_config
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from moebius_engine.layout import Layout
from moebius_engine.layout.partition import Capacity
from moebius_engine.sglang import grammars

# Module → globals whose value depends on the layout (shared by the whole process).
LAYOUT_GLOBALS: dict[str, tuple[str, ...]] = {
    "sglang.srt.distributed.parallel_state": ("_ATTN_TP", "_ATTN_CP", "_MOE_DP", "_MOE_EP", "_MOE_TP"),
    "sglang.srt.layers.dp_attention": (
        "_ATTN_DP_RANK",
        "_ATTN_DP_SIZE",
        "_LOCAL_ATTN_DP_SIZE",
        "_LOCAL_ATTN_DP_RANK",
        "_ENABLE_DP_ATTENTION_FLAG",
    ),
    "sglang.srt.layers.moe.utils": (
        "MOE_A2A_BACKEND",
        "MOE_RUNNER_BACKEND",
        "SPECULATIVE_MOE_RUNNER_BACKEND",
        "SPECULATIVE_MOE_A2A_BACKEND",
        "DEEPEP_MODE",
        "DEEPEP_CONFIG",
        "IS_TBO_ENABLED",
        "IS_SBO_ENABLED",
        "TBO_TOKEN_DISTRIBUTION_THRESHOLD",
        "DISABLE_FLASHINFER_CUTLASS_MOE_FP4_ALLGATHER",
        "MOE_QUANTIZATION",
    ),
    "sglang.srt.server_args": ("_global_server_args",),
    "sglang.srt.eplb.expert_distribution": ("_global_expert_distribution_recorder",),
    "sglang.srt.eplb.expert_location": ("_global_expert_location_metadata",),
}


class GlobalState:
    """Values of LAYOUT_GLOBALS in one layout. Raises AttributeError, naming it, for a global that upstream dropped."""

    def __init__(self) -> None:
        self._values = [
            (module, name, getattr(module, name))
            for module, names in ((importlib.import_module(path), names) for path, names in LAYOUT_GLOBALS.items())
            for name in names
        ]

    def value(self, module: str, name: str) -> Any:
        return next(value for mod, known, value in self._values if (mod.__name__, known) == (module, name))

    def install(self) -> None:
        for module, name, value in self._values:
            setattr(module, name, value)


def enter_tp_globals(tp_server_args: ServerArgs) -> None:
    """Turn EP's process globals into TP's.

    With tp = dp = ep = P every EP group is the TP group or a single rank (parallel_state.py:1868-2020), so TP needs
    no new process group, only other names for the same ones.
    """
    single = parallel_state._MOE_TP
    if single.world_size != 1 or parallel_state._MOE_EP.world_size != tp_server_args.tp_size:
        raise RuntimeError(
            f"EP groups are not as expected: MOE_TP has {single.world_size} ranks (1 expected), "
            f"MOE_EP {parallel_state._MOE_EP.world_size} ({tp_server_args.tp_size} expected)"
        )
    whole = parallel_state._TP
    parallel_state._ATTN_TP, parallel_state._MOE_TP, parallel_state._MOE_EP = whole, whole, single
    dp_attention._ENABLE_DP_ATTENTION_FLAG = False
    dp_attention._ATTN_DP_RANK, dp_attention._ATTN_DP_SIZE = 0, 1
    dp_attention._LOCAL_ATTN_DP_RANK, dp_attention._LOCAL_ATTN_DP_SIZE = 0, 1
    set_global_server_args_for_scheduler(tp_server_args)
    initialize_moe_config(tp_server_args)
    expert_location._global_expert_location_metadata = None  # its setter asserts that it is unset (:317)


class LayoutState:
    """One layout of one rank: its runner, its globals, its pools, and the scheduler attributes that go with them."""

    def __init__(self, layout: Layout, runner, server_args: ServerArgs, global_state: GlobalState):
        self.layout, self.runner, self.server_args, self.globals = layout, runner, server_args, global_state
        self.scheduler_attributes: dict[str, Any] = {}

    @property
    def requests(self):
        """SGLang's ReqToTokenPool: request slot → KV rows."""
        return self.runner.req_to_token_pool

    @property
    def allocator(self):
        """SGLang's KV row allocator."""
        return self.runner.token_to_kv_pool_allocator

    @property
    def capacity(self) -> Capacity:
        """Of one rank."""
        return Capacity(self.requests.size, self.allocator.size)

    @property
    def tree(self):
        """SGLang's prefix cache (RadixCache or ChunkCache)."""
        return self.scheduler_attributes["tree_cache"]

    def clear(self) -> None:
        """Forget every request and prefix: a layout that is not selected holds none."""
        self.tree.reset()
        self.requests.clear()
        self.allocator.clear()

    def select(self, scheduler) -> None:
        """Make this the layout that `scheduler` runs. Moves nothing and builds nothing."""
        self.globals.install()
        for name, value in self.scheduler_attributes.items():
            setattr(scheduler, name, value)
        worker = scheduler.tp_worker
        worker._model_runner, worker.server_args, worker.ep_size = (
            self.runner,
            self.server_args,
            self.server_args.ep_size,
        )
        scheduler.policy.tree_cache = self.tree
        scheduler.session_controller.tree_cache = self.tree
        grammars.follow_layout(scheduler)
        scheduler.layout = self.layout
