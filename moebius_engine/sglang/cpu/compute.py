"""Computation that SGLang's CPU path lacks: for data-parallel attention, expert parallelism and seeded sampling."""

from typing import Any

import numpy as np
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


def murmur_hash32(original, seed, positions, col_indices):
    """MurmurHash3 of (seed, low and high word; position; column) as upstream's Triton kernel (layers/utils/hash.py).

    seed, positions: (n,). col_indices: (m,). Returns: (n, m), int64, below 2**32.
    """
    if seed.is_cuda:
        return original(seed, positions, col_indices)
    words = seed.to(torch.int64).numpy().astype(np.uint64)[:, None]
    columns = col_indices.numpy().astype(np.uint64)[None, :]
    hashed: Any = np.zeros((1, 1), np.uint64)
    for block in (words & _WORD, words >> 32, positions.numpy().astype(np.uint64)[:, None] & _WORD, columns):
        block = _rotated(block * 0xCC9E2D51 & _WORD, 15) * 0x1B873593 & _WORD
        hashed = (_rotated(hashed ^ block, 13) * 5 + 0xE6546B64) & _WORD
    hashed = hashed ^ 16  # bytes hashed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = (hashed ^ hashed >> shift) * factor & _WORD
    return torch.from_numpy((hashed ^ hashed >> 16).astype(np.int64))


_WORD = np.uint64(0xFFFFFFFF)


def _rotated(word, bits: int):
    return (word << bits | word >> (32 - bits)) & _WORD
