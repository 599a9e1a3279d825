"""The table of hooks that SGLang 0.5.12 needs on a machine without CUDA."""

from sglang.srt.plugins.hook_registry import HookType

from moebius_engine.sglang.cpu import collectives, compute, controller, paging
from moebius_engine.sglang.hooks import Hook

_GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator."
_PAGED = "sglang.srt.mem_cache.allocator.PagedTokenToKVPoolAllocator."
_AROUND, _REPLACE = HookType.AROUND, HookType.REPLACE

CPU_HOOKS = (
    Hook(
        _GROUP + "all_gather_into_tensor",
        _AROUND,
        collectives.all_gather_into_tensor,
        ("self", "output", "input"),
        "the custom op behind it is registered for CUDA only",
    ),
    Hook(
        _GROUP + "reduce_scatter_tensor",
        _AROUND,
        collectives.reduce_scatter_tensor,
        ("self", "output", "input"),
        "the custom op behind it is registered for CUDA only",
    ),
    Hook(
        _GROUP + "reduce_scatterv",
        _AROUND,
        collectives.reduce_scatterv,
        ("self", "input_", "output", "sizes"),
        "it asserts pynccl",
    ),
    Hook(
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        _AROUND,
        compute.moe_forward_native,
        ("layer", "x", "topk_output", "moe_runner_config"),
        "expert parallelism marks experts of other ranks with id -1, which it cannot count",
    ),
    Hook(
        "sglang.srt.layers.dp_attention.memcpy_triton",
        _AROUND,
        compute.memcpy_triton,
        ("dst", "src", "dim", "offset", "sz", "offset_src"),
        "data-parallel attention copies with a Triton kernel",
    ),
    Hook(
        "sglang.srt.layers.sampler.murmur_hash32",
        _AROUND,
        compute.murmur_hash32,
        ("seed", "positions", "col_indices"),
        "seeded sampling hashes with a Triton kernel",
    ),
    Hook(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value",
        _REPLACE,
        compute.seq_len_fill_value,
        ("self",),
        "data-parallel attention pads batches with it; the torch back end only inherits a method that raises",
        adds=True,
    ),
    Hook(
        _PAGED + "alloc_extend",
        _AROUND,
        paging.alloc_extend,
        (
            "self",
            "prefix_lens",
            "prefix_lens_cpu",
            "seq_lens",
            "seq_lens_cpu",
            "last_loc",
            "extend_num_tokens",
            "num_new_pages",
        ),
        "with page_size > 1 it allocates with a Triton kernel",
    ),
    Hook(
        _PAGED + "alloc_decode",
        _AROUND,
        paging.alloc_decode,
        ("self", "seq_lens", "seq_lens_cpu", "last_loc"),
        "with page_size > 1 it allocates with a Triton kernel",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.adjust_config_with_unaligned_cpu_tp",
        _AROUND,
        compute.adjust_config,
        ("model_config", "load_config", "tp_size"),
        "with fewer KV heads than ranks it pads the heads, in EP too, where no rank has a part of them",
    ),
    Hook(
        "sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop",
        _REPLACE,
        controller.event_loop,
        ("self",),
        "it polls its socket without a pause, which takes a core from the ranks",
    ),
    Hook(
        "torch.tensor",
        _AROUND,
        compute.tensor_without_pinning,
        (),
        "forward_batch_info.py:922 and logits_processor.py:542,545,616 pin host memory, which needs a CUDA driver",
    ),
)
