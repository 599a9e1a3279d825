"""Sizes of published models, so that a budget or a plan needs no download: the fields of config.json that they read.

Source: config.json of Qwen/Qwen3-235B-A22B, Qwen/Qwen3-30B-A3B and Qwen/Qwen3-Coder-480B-A35B-Instruct, Hugging Face.
"""

from typing import Any

_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
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
    "Qwen3-Coder-480B-A35B": _QWEN3_MOE
    | {
        "num_hidden_layers": 62,
        "hidden_size": 6144,
        "moe_intermediate_size": 2560,
        "num_experts": 160,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
    },
}
