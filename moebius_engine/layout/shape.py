"""The sizes of a model that a switch depends on, and whether P ranks can hold it in both layouts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SUPPORTED = ("qwen3_moe",)


@dataclass(frozen=True)
class ModelShape:
    """layers L, hidden H, intermediate I (of one expert), experts E, kv_heads K, head_dim D."""

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    experts: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Read a Hugging Face config.

        Raises ValueError for a model type that no rule covers, a model that mixes dense and expert layers, and tied
        embeddings.
        """
        kind = config.get("model_type")
        if kind not in SUPPORTED:
            raise ValueError(f"model_type={kind!r} is not supported: use one of {list(SUPPORTED)}")
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        if step != 1 or dense:
            raise ValueError(
                f"decoder_sparse_step={step} and mlp_only_layers={dense}: every layer must have experts (1 and [])"
            )
        if config.get("tie_word_embeddings"):
            raise ValueError(
                "tie_word_embeddings=True: SGLang 0.5.12 does not tie Qwen3-MoE's output head, which neither such a "
                "checkpoint nor an update of it would set; save the model untied, with its lm_head.weight"
            )
        if (quantised := config.get("quantization_config")) is not None:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise ValueError(
                f"quantization_config={method!r}: both layouts hold unquantised experts, whose scales would not be "
                "moved; use the checkpoint in bfloat16"
            )
        # transformers 5 writes num_local_experts, older checkpoints num_experts.
        experts = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
        heads = config["num_attention_heads"]
        return cls(
            model_type=kind,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["moe_intermediate_size"],
            experts=experts,
            q_heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
        )


def check_ranks(shape: ModelShape, ranks: int) -> None:
    """Raise ValueError, with both numbers, unless P = ranks can hold the model in both layouts."""
    if ranks < 2:
        raise ValueError(f"ranks={ranks}: two layouts need at least 2 ranks")
    fitting = [p for p in range(2, shape.experts + 1) if not _misfits(shape, p)]
    for name, size in _misfits(shape, ranks):
        raise ValueError(f"ranks={ranks} does not divide {name}={size}; ranks that fit this model: {fitting}")


def _misfits(shape: ModelShape, ranks: int) -> list[tuple[str, int]]:
    sizes = [("experts", shape.experts), ("intermediate", shape.intermediate), ("q_heads", shape.q_heads)]
    misfits = [(name, size) for name, size in sizes if size % ranks]
    # With fewer KV heads than ranks, each head is held by ranks / kv_heads of them.
    if shape.kv_heads % ranks and ranks % shape.kv_heads:
        misfits.append(("kv_heads", shape.kv_heads))
    return misfits
