"""The kernels of one MoE layer as one rank of P sees them, in EP and in TP: which tile sizes should EP take?

    python scripts/bench_expert_tiles.py --out benchmarks/expert_tiles_h200.json

One process on one GPU: P ranks need no P GPUs for this. Tokens are those of all ranks. EP: E/P experts, and what is
routed to others is left out: with SGLang's default tiles, which it takes for a rank's share; with those that are tuned
for all E experts (moebius_engine/sglang/expert_tiles.py); with those for all E experts of I/2 or I/4. TP: all experts,
I/P wide. Uniform random routing.

Legend: E experts, P ranks, H hidden, I expert intermediate.
"""

import json
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from gpu_time import median_ms
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, override_config
from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import get_default_config, get_moe_configs
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from moebius_engine.memory.presets import PRESETS

LAYERS = 4  # different weights in a row, so that they do not come from the cache
REPEATS = 9
Tiles = dict[str, int]
Weights = list[tuple[torch.Tensor, torch.Tensor]]


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")] = Path("benchmarks/expert_tiles_h200.json"),
    case: Annotated[list[str], typer.Option(help="MODEL:P; may be given several times")] = [  # noqa: B006
        "Qwen3-30B-A3B:2",
        "Qwen3-30B-A3B:4",
        "Qwen3-30B-A3B:8",
        "Qwen3-235B-A22B:8",
    ],
    tokens: Annotated[list[int], typer.Option(help="of a step, of all ranks")] = [2, 8, 32, 64, 128, 256, 512, 2048],  # noqa: B006
) -> None:
    args = ServerArgs.__new__(ServerArgs)
    vars(args).update(enable_deterministic_inference=False, enable_fused_moe_sum_all_reduce=False)
    set_global_server_args_for_scheduler(args)
    torch.manual_seed(0)
    setting = {
        "gpu": torch.cuda.get_device_name(),
        "unit": f"microseconds a layer, median of {REPEATS} replays of a CUDA graph of {LAYERS} layers, bf16",
        "versions": {name: version(name) for name in ("sglang", "torch", "triton")},
        "date": date.today().isoformat(),
    }
    rows: list[dict[str, Any]] = []
    for model, ranks in (each.rsplit(":", 1) for each in case):
        for row in _rows(PRESETS[model], int(ranks), tokens):
            rows.append({"model": model, "ranks": int(ranks), **row})
            typer.echo(json.dumps(rows[-1]))
            out.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def _rows(config: dict[str, Any], ranks: int, tokens: list[int]):
    experts, hidden, size = config["num_experts"], config["hidden_size"], config["moe_intermediate_size"]
    top_k, local, part = config["num_experts_per_tok"], experts // ranks, size // ranks
    ep, tp = _weights(local, size, hidden), _weights(experts, part, hidden)
    whole, half, quarter = (get_moe_configs(experts, size // cut, None) for cut in (1, 2, 4))
    of_tp = get_moe_configs(experts, part, None)
    for count in tokens:
        default = get_default_config(count, local, size, hidden, top_k, None, False)
        row = {"tokens": count, "ep_default_us": _time(ep, count, default, experts, top_k)}
        for name, tuned in (("whole", whole), ("half", half), ("quarter", quarter)):
            if tuned:
                row[f"ep_{name}_us"] = _time(ep, count, _of(tuned, count), experts, top_k)
        tiles = _of(of_tp, count) if of_tp else get_default_config(count, experts, part, hidden, top_k, None, False)
        yield {**row, "tp_us": _time(tp, count, tiles, experts, top_k), "tp_is_tuned": bool(of_tp)}


def _of(tuned: dict[int, Tiles], count: int) -> Tiles:
    """As SGLang does (fused_moe_triton_config.try_get_optimal_moe_config)."""
    return tuned[min(tuned, key=lambda known: abs(known - count))]


def _weights(experts: int, size: int, hidden: int) -> Weights:
    def draw(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    return [(draw(experts, 2 * size, hidden), draw(experts, hidden, size)) for _ in range(LAYERS)]


def _time(weights: Weights, count: int, tiles: Tiles, experts: int, top_k: int) -> float:
    """Microseconds of a layer."""
    local, hidden = weights[0][1].shape[:2]
    x = torch.randn(count, hidden, device="cuda", dtype=torch.bfloat16)
    routed = [torch.rand(count, experts, device="cuda").topk(top_k).indices.to(torch.int32) for _ in weights]
    routed = [torch.where(chosen < local, chosen, -1) for chosen in routed]
    shares = torch.full((count, top_k), 1 / top_k, device="cuda")

    def layers() -> None:
        for (w13_EIH, w2_EHI), chosen in zip(weights, routed, strict=True):
            fused_moe.fused_experts_impl(x, w13_EIH, w2_EHI, shares, chosen, filter_expert=local < experts)

    with override_config(tiles):
        layers()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
    return round(1e3 * median_ms(graph.replay, REPEATS) / LAYERS, 1)


if __name__ == "__main__":
    typer.run(main)
