"""A switch on real GPUs: SGLang with both CUDA-graph sets, dummy weights, requests in flight at every switch.

    python scripts/bench_switch.py --ranks 2 --share-gpu --out benchmarks/switch_h200.json

--share-gpu puts all ranks on one GPU, which needs MPS and NCCL 2.32 or later. It shows what the mechanism costs, and
says nothing about NVLink.
"""

import asyncio
import json
import statistics
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer

from moebius_engine.config import SwitchConfig
from moebius_engine.engine import SwitchingEngine

PROMPT, VOCABULARY = 65, 32768  # tokens
PHASES = ("decide_ms", "metadata_ms", "kv_ms", "weights_ms", "rest_ms", "total_ms")


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    layers: Annotated[int, typer.Option(min=1)] = 8,
    requests: Annotated[int, typer.Option(min=1, help="in flight at every switch")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="tokens a response")] = 2000,
    switches: Annotated[int, typer.Option(min=2)] = 12,
    transfer: Annotated[str, typer.Option(help="direct, collective or auto")] = "auto",
    share_gpu: Annotated[bool, typer.Option("--share-gpu", help="all ranks on GPU 0")] = False,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_model(layers)), encoding="utf-8")
        engine = SwitchingEngine(
            folder,
            ranks=ranks,
            switch=SwitchConfig(policy="ep", transfer=transfer, share_gpu=share_gpu, timeout_s=60),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            attention_backend="triton",
            sampling_backend="pytorch",
            grammar_backend="none",
            disable_custom_all_reduce=True,
            disable_piecewise_cuda_graph=True,
            max_total_tokens=65536,
            mem_fraction_static=0.5,
            cuda_graph_bs=[requests],
            max_running_requests=requests,
        )
        try:
            report = engine.loop.run_until_complete(_measure(engine, requests, tokens, switches))
        finally:
            engine.shutdown()
    report["setting"] = {
        "gpu": torch.cuda.get_device_name(0),
        "ranks": ranks,
        "ranks share one GPU": share_gpu,
        "model": f"{layers} layers, 128 experts, H 2048, I 768, 4 KV heads, bf16, dummy weights",
        "transfer": transfer,
        "requests": requests,
        "versions": {name: version(name) for name in ("sglang", "torch")},
        "date": date.today().isoformat(),
    }
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    typer.echo(json.dumps(report["median_ms"]))


async def _measure(engine: SwitchingEngine, requests: int, tokens: int, switches: int) -> dict:
    """Switch to and fro while one batch is decoded."""
    greedy = {"temperature": 0, "ignore_eos": True}
    await engine.async_generate(input_ids=[[5, 6, 7]] * 4, sampling_params={**greedy, "max_new_tokens": 8})
    began = time.perf_counter()
    batch = asyncio.ensure_future(
        engine.async_generate(
            input_ids=[[1 + row, *range(20, 19 + PROMPT)] for row in range(requests)],
            sampling_params={**greedy, "max_new_tokens": tokens},
        )
    )
    await asyncio.sleep(2)  # the first prefill of a shape compiles kernels
    records = []
    for turn in range(switches):
        record = await engine.async_switch("tp" if turn % 2 == 0 else "ep")
        if record is None or record.refused or record.running != requests:
            raise RuntimeError(f"not a switch of {requests} running requests: {record}; give more --tokens")
        records.append(record.model_dump())
        await asyncio.sleep(0.2)
    answers = await batch
    return {
        "median_ms": {
            way: {phase: statistics.median(r[phase] for r in records if r["target"] == way) for phase in PHASES}
            for way in ("tp", "ep")
        },
        "tokens": sum(len(answer["output_ids"]) for answer in answers),
        "tokens_expected": requests * tokens,
        "batch_s": time.perf_counter() - began,
        "switches": [
            {key: r[key] for key in ("target", "running", "kv_tokens", "kv_bytes", "weight_bytes", *PHASES)}
            for r in records
        ],
    }


def _model(layers: int) -> dict:
    """config.json of a Qwen3-MoE with the experts of Qwen3-30B-A3B."""
    return {
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


if __name__ == "__main__":
    typer.run(main)
