"""Computation that SGLang's CPU path lacks for data-parallel attention and expert parallelism."""

import torch
import torch.nn.functional as F


def moe_forward_native(original, layer, x, topk_output, moe_runner_config):
    """Upstream's loop counts experts with scatter_, which fails on the id -1 of an expert that another rank holds."""
    if layer.moe_ep_size == 1:
        return original(layer, x, topk_output, moe_runner_config)
    weights_TK, ids_TK, _ = topk_output
    out_TH = torch.zeros_like(x)
    local = (ids_TK >= 0) & (ids_TK < layer.w13_weight.shape[0])
    for expert in torch.unique(ids_TK[local]).tolist():
        token, choice = torch.nonzero(ids_TK == expert, as_tuple=True)
        gate, up = F.linear(x[token], layer.w13_weight[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, layer.w2_weight[expert])
        out_TH.index_add_(0, token, (y * weights_TK[token, choice].unsqueeze(-1).to(y.dtype)).to(out_TH.dtype))
    return out_TH


def memcpy_triton(original, dst, src, dim, offset, sz, offset_src):
    if not dst.is_cpu:
        return original(dst, src, dim, offset, sz, offset_src)
    start, size = int(offset), int(sz)
    if offset_src:
        dst[:size].copy_(src[start : start + size])
    else:
        dst[start : start + size].copy_(src[:size])
    return None


def tensor_without_pinning(original, *args, **kwargs):
    """`pin_memory=True` raises without a CUDA driver."""
    kwargs.pop("pin_memory", None)
    return original(*args, **kwargs)


def adjust_config(original, model_config, load_config, tp_size):
    """Fewer KV heads than ranks: let several ranks hold each, as on a GPU, instead of padding the model's heads."""
    heads, kv_heads = model_config.num_attention_heads, model_config.get_total_num_kv_heads()
    if kv_heads < tp_size and tp_size % kv_heads == 0 and heads % tp_size == 0:
        return model_config
    return original(model_config, load_config, tp_size)


def seq_len_fill_value(self) -> int:
    return 1
