"""TP's copies of what is not an expert: shared with EP's module tree where equal, else cut from its full weights."""

from typing import Any

import torch

from moebius_engine.layout.heads import kv_heads_per_rank
from moebius_engine.layout.shape import ModelShape

EXPERT_PARAMETERS = ("w13_weight", "w2_weight")


def share_equal(full: torch.nn.Module, shard: torch.nn.Module) -> None:
    """Let `shard` use full's tensors where both layouts hold the same: norms, router, output head.

    With P >= 2 ranks a tensor that TP cuts further than EP has another shape, so equal shapes mean equal content.
    """
    shards = dict(shard.named_parameters())
    for name, parameter in full.named_parameters():
        if not name.endswith(EXPERT_PARAMETERS) and shards[name].shape == parameter.shape:
            shards[name].data = parameter.data


def shard_bytes(full: torch.nn.Module, shape: ModelShape, ranks: int) -> int:
    """Bytes of the shards that TP will hold beside `full`, the EP module tree: what `refresh` writes."""
    heads = shape.q_heads // ranks + 2 * kv_heads_per_rank(shape.kv_heads, ranks)
    total = 0
    for name, parameter in full.named_parameters():
        if ".qkv_proj." in name:
            total += parameter.nbytes * heads // (shape.q_heads + 2 * shape.kv_heads)
        elif name == "model.embed_tokens.weight" or name.endswith(".o_proj.weight"):
            total += parameter.nbytes // ranks
    return total


def refresh(full: torch.nn.Module, shard: torch.nn.Module, shape: ModelShape) -> int:
    """Cut this rank's attention and embedding shards anew from the full weights, by SGLang's own loaders.

    full, shard: the EP and the TP module tree. Returns: bytes written.
    """
    shards = dict(shard.named_parameters())
    written = 0
    for name, parameter in full.named_parameters():
        target: Any = shards[name]  # SGLang hangs a weight_loader on each parameter
        if name.endswith(EXPERT_PARAMETERS) or target.data_ptr() == parameter.data_ptr():
            continue
        if ".qkv_proj." in name:
            rows = [heads * shape.head_dim for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads)]
            for which, part in zip("qkv", parameter.data.split(rows), strict=True):
                target.weight_loader(target, part, which)
        elif name == "model.embed_tokens.weight":
            target.weight_loader(target, parameter.data[: shape.vocab_size])
        elif name.endswith(".o_proj.weight"):
            target.weight_loader(target, parameter.data)
        else:
            raise RuntimeError(f"no rule to cut {name} {tuple(parameter.shape)} into {tuple(target.shape)}")
        written += target.data.nbytes
    return written
