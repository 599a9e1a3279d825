"""The scheduler attributes that depend on the layout, for both layouts."""

from typing import Any

from sglang.srt.distributed import parallel_state
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchEmbeddingOutput,
    BatchStrOutput,
    BatchTokenIDOutput,
    HealthCheckOutput,
)
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache

from moebius_engine.layout import Layout

# Read from the scheduler as EP's __init__ left them; TP's values are computed below.
LAYOUT_ATTRIBUTES = (
    "server_args",
    "attn_tp_rank",
    "attn_tp_size",
    "attn_dp_rank",
    "dp_size",
    "moe_ep_rank",
    "moe_ep_size",
    "attn_tp_group",
    "attn_tp_cpu_group",
    "dp_tp_group",
    "dp_tp_cpu_group",
    "require_mlp_sync",
    "req_to_token_pool",
    "token_to_kv_pool_allocator",
    "tree_cache",
    "future_map",
    "max_total_num_tokens",
    "max_running_requests",
    "max_prefill_tokens",
    "chunked_prefill_size",
    "init_new_token_ratio",
    "min_new_token_ratio",
    "new_token_ratio_decay",
    "send_to_tokenizer",
    "send_to_detokenizer",
)

# What one rank reports for all in TP, where every rank computes it.
_REPORTS = (AbortReq, BatchTokenIDOutput, BatchStrOutput, BatchEmbeddingOutput, HealthCheckOutput)


class ControlOnlySender:
    """In TP, rank 0 alone reports requests. Answers to control messages still go out: one a rank is expected."""

    def __init__(self, inner):
        self._inner = inner

    def send_output(self, output, recv_obj=None) -> None:
        if not isinstance(output, _REPORTS):
            self._inner.send_output(output, recv_obj)


def attach_scheduler_state(scheduler) -> None:
    """Give both layouts their scheduler attributes. Raises AttributeError if upstream dropped one of them."""
    scheduler.layouts[Layout.EP].scheduler_attributes = {name: getattr(scheduler, name) for name in LAYOUT_ATTRIBUTES}
    tp = scheduler.layouts[Layout.TP]
    tp.scheduler_attributes = _tp_attributes(scheduler, tp)
    if tp.scheduler_attributes.keys() != set(LAYOUT_ATTRIBUTES):
        raise RuntimeError(f"TP lacks {set(LAYOUT_ATTRIBUTES) ^ tp.scheduler_attributes.keys()}")
    for state in scheduler.layouts.values():
        state.server_args.pp_max_micro_batch_size = max(state.scheduler_attributes["max_running_requests"], 1)


def _tp_attributes(scheduler, tp) -> dict[str, Any]:
    args, runner, whole = tp.server_args, tp.runner, parallel_state._TP
    silent = scheduler.tp_rank != 0
    chunk = args.chunked_prefill_size if (args.chunked_prefill_size or -1) > 0 else None
    # Scheduler.init_schedule_policy (scheduler.py:1152)
    ratio = min(envs.SGLANG_INIT_NEW_TOKEN_RATIO.get() * args.schedule_conservativeness, 1.0)
    least = min(ratio * envs.SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR.get(), 1.0)
    future_map = None
    if scheduler.enable_overlap:
        future_map = FutureMap(
            runner.max_running_requests,
            chunk,
            scheduler.model_config.context_len,
            scheduler.device,
            scheduler.spec_algorithm,
        )
    return {
        "server_args": args,
        "attn_tp_rank": scheduler.tp_rank,
        "attn_tp_size": scheduler.tp_size,
        "attn_dp_rank": 0,
        "dp_size": 1,
        "moe_ep_rank": 0,
        "moe_ep_size": 1,
        "attn_tp_group": whole,
        "attn_tp_cpu_group": whole.cpu_group,
        "dp_tp_group": whole,
        "dp_tp_cpu_group": whole.cpu_group,
        "require_mlp_sync": False,
        "req_to_token_pool": runner.req_to_token_pool,
        "token_to_kv_pool_allocator": runner.token_to_kv_pool_allocator,
        "tree_cache": _tp_tree(scheduler, runner, whole),
        "future_map": future_map,
        "max_total_num_tokens": runner.max_total_num_tokens,
        "max_running_requests": runner.max_running_requests,
        "max_prefill_tokens": args.max_prefill_tokens,
        "chunked_prefill_size": chunk,
        "init_new_token_ratio": ratio,
        "min_new_token_ratio": least,
        "new_token_ratio_decay": (ratio - least) / envs.SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS.get(),
        "send_to_tokenizer": ControlOnlySender(scheduler.send_to_tokenizer) if silent else scheduler.send_to_tokenizer,
        "send_to_detokenizer": (
            ControlOnlySender(scheduler.send_to_detokenizer) if silent else scheduler.send_to_detokenizer
        ),
    }


def _tp_tree(scheduler, runner, whole):
    """A prefix tree of the kind that SGLang chose for EP."""
    kind = type(scheduler.tree_cache)
    params = CacheInitParams(
        disable=scheduler.disable_radix_cache,
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        page_size=scheduler.page_size,
        tp_cache_group=whole.cpu_group,
        attn_tp_cache_group=whole.cpu_group,
        attn_cp_cache_group=scheduler.attn_cp_cpu_group,
        eviction_policy=scheduler.server_args.radix_eviction_policy,
        chunked_prefill_size=scheduler.chunked_prefill_size if kind is ChunkCache else None,
    )
    return kind(params)
