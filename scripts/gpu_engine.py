"""The model and the engine arguments of the benchmarks on GPUs: the experts of Qwen3-30B-A3B, dummy weights."""

import json
from collections.abc import Iterable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 32768  # tokens


def _describe(layers: int) -> str:
    return f"{layers} layers, 128 experts, H 2048, I 768, 4 KV heads, bf16, dummy weights"


def setting(ranks: int, layers: int, share_gpu: bool, **more: Any) -> dict[str, Any]:
    """What a benchmark's numbers hold for. more: what else the benchmark has set."""
    return {
        "gpu": torch.cuda.get_device_name(0),
        "ranks": ranks,
        "ranks share one GPU": share_gpu,
        "model": _describe(layers),
        **more,
        "versions": {name: version(name) for name in ("sglang", "torch")},
        "date": date.today().isoformat(),
    }


def server_args(batch_sizes: Iterable[int], requests: int, tokens: int) -> dict[str, Any]:
    """SGLang's arguments. batch_sizes: of the captured graphs. requests, tokens: that a rank may hold."""
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_custom_all_reduce": True,
        "disable_piecewise_cuda_graph": True,
        "max_total_tokens": tokens,
        "mem_fraction_static": 0.5,
        "cuda_graph_bs": sorted(batch_sizes),
        "max_running_requests": requests,
    }


def write_model(folder: str, layers: int) -> str:
    """Write config.json, which is all that dummy weights need. Returns the folder."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 0,
        "bos_token_id": 1,
    }
    (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
