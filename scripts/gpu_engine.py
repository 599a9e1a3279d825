"""The model and the engine arguments of the benchmarks on GPUs: a published model's sizes, dummy or random weights."""

import json
from collections.abc import Iterable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from moebius_engine.memory.presets import PRESETS
from rollout.server_argument import server_argument

MODEL = "Qwen3-30B-A3B"
Weights = Literal["dummy", "random"]
SPREAD = 0.85  # of its KV rows that a rank is asked to hold at most: ranks never have equally many tokens


def setting(
    ranks: int,
    model: str,
    layers: int | None,
    share_gpu: bool,
    changes: list[str],
    weights: Weights = "dummy",
    **more: Any,
) -> dict[str, Any]:
    """What a benchmark's numbers hold for. changes: of --set. more: what else the benchmark has set."""
    of = PRESETS[model]["num_hidden_layers"]
    return {
        "gpu": torch.cuda.get_device_name(0),
        "ranks": ranks,
        "ranks share one GPU": share_gpu,
        "model": f"{model}, {layers or of} of its {of} layers, bf16, {weights} weights",
        "server arguments": changes,
        **more,
        "versions": {name: version(name) for name in ("sglang", "torch")},
        "date": date.today().isoformat(),
    }


def server_args(
    batches: Iterable[int], ranks: int, tokens: int, share_gpu: bool, changes: Iterable[str]
) -> dict[str, Any]:
    """SGLang's arguments, with graphs for `batches`, numbers of requests of all ranks, in both layouts. tokens: that a
    rank may hold in EP. changes: of --set, argument=value each.

    Each rank may run one request more than it gets (calibration.sizes.sizes_that_fit says why). SGLang's own
    all-reduce is left on where each rank has a GPU; it refuses ranks that share one.
    """
    batches = list(batches)
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_custom_all_reduce": share_gpu,
        "max_total_tokens": tokens,
        "mem_fraction_static": 0.8,
        "cuda_graph_bs": sorted({size for count in batches for size in (-(-count // ranks), count)}),
        "max_running_requests": max(batches) + ranks,
        **dict(map(server_argument, changes)),
    }


def tokens_per_rank(requests: int, tokens: int, ranks: int) -> int:
    """KV tokens of a rank in EP, for `requests` of all ranks that have so many tokens each."""
    return round(-(-requests // ranks) * tokens / SPREAD)


def write_model(folder: str, model: str = MODEL, layers: int | None = None) -> str:
    """Write config.json, which is all that dummy weights need. layers: the model's if None. Returns the folder."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        **PRESETS[model],
        "intermediate_size": 3 * PRESETS[model]["hidden_size"],  # of a dense layer, of which these models have none
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "eos_token_id": 0,
        "bos_token_id": 1,
    }
    if layers is not None:
        config["num_hidden_layers"] = layers
    (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_weights(folder: str) -> None:
    """Random weights beside the config.json in `folder`, drawn on the GPU, 2 bytes a parameter. All engines then load
    the same. Dummy ones differ by layout, and so then do the experts that tokens choose: SGLang draws each parameter of
    each rank with one seed, whatever part of it the rank holds."""
    config = Qwen3MoeConfig.from_json_file(Path(folder, "config.json"))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()  # for the engines
