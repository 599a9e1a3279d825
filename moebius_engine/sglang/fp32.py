"""float32 on a GPU, to compare layouts exactly: SGLang 0.5.12 lacks a norm for it, and rounds experts to float16."""

import torch
from sglang.srt.plugins.hook_registry import HookType

from moebius_engine.sglang.hooks import Hook


def forward_cuda(original, self, x, residual=None, post_residual_addition=None):
    if x.dtype == torch.float32:
        return self.forward_native(x, residual, post_residual_addition)
    return original(self, x, residual, post_residual_addition)


def invoke_fused_moe_kernel(original, A, *args, **kwargs):
    if A.dtype == torch.float32:
        import triton.language as tl

        kwargs["compute_type"] = tl.float32
    return original(A, *args, **kwargs)


FP32_HOOKS = (
    Hook(
        "sglang.srt.layers.layernorm.RMSNorm.forward_cuda",
        HookType.AROUND,
        forward_cuda,
        ("self", "x", "residual", "post_residual_addition"),
        "the CUDA kernel of the norm refuses float32",
    ),
    Hook(
        "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.invoke_fused_moe_kernel",
        HookType.AROUND,
        invoke_fused_moe_kernel,
        ("A", "B", "bias", "C"),
        "the caller asks for float16 results when the model is float32",
    ),
)
