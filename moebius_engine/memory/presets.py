"""Sizes of published models, so that a budget needs no download: the fields of their config.json that it reads.

Source: config.json of Qwen/Qwen3-235B-A22B and Qwen/Qwen3-30B-A3B on Hugging Face.
"""

from typing import Any

_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

PRESETS: dict[str, dict[str, Any]] = {
    "Qwen3-235B-A22B": _QWEN3_MOE
    | {
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
    },
    "Qwen3-30B-A3B": _QWEN3_MOE
    | {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
    },
}
