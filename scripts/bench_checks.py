"""What the checks of a switch cost on its normal path: the sums of the layer moves that are compared, and a vote.

    python scripts/bench_checks.py --out benchmarks/checks_cpu.json

Two processes over gloo move the experts of a model both ways, layer by layer, and compare each layer's sums as
transfer/checks.py does; shares are of that move, so of less than a whole switch. Medians.
"""

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from moebius_engine.exchange import agree
from moebius_engine.layout import Layout, other
from moebius_engine.layout.plan import expert_blocks
from moebius_engine.layout.shape import ModelShape
from moebius_engine.layout.slots import layer_order
from moebius_engine.memory.arena import Arena
from moebius_engine.transfer.base import LayerMove
from moebius_engine.transfer.checks import EVERY, Checks
from moebius_engine.transfer.collective import CollectiveTransfer

RANKS, ROUNDS = 2, 40
MODELS = {  # layers, hidden, intermediate, experts
    "tests' model": (4, 64, 64, 8),
    "32 experts, H 512, I 256": (8, 512, 256, 32),
}


def main(out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("benchmarks/checks_cpu.json")) -> None:
    rows = [{"model": name, **measure(*sizes)} for name, sizes in MODELS.items()]
    setting = {
        "ranks": RANKS,
        "rounds": ROUNDS,
        "compared": f"one of {EVERY} layer moves",
        "back end": "gloo, fp32",
        "cores": len(os.sched_getaffinity(0)),
        "versions": {"torch": version("torch")},
        "date": date.today().isoformat(),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"rows": rows, "setting": setting}, indent=1) + "\n", encoding="utf-8")
    typer.echo(out.read_text(encoding="utf-8"))


def measure(*sizes: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run_rank, args=(rank, folder, sizes, sender)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        found = receiver.recv()
        for process in ranks:
            process.join(60)
    return found


def run_rank(rank: int, folder: str, sizes: tuple[int, int, int, int], sender: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    layers, hidden, intermediate, experts = sizes
    shape = ModelShape("qwen3_moe", layers, hidden, intermediate, experts, 4, 2, 16, 512)
    arena = Arena(shape, RANKS, torch.float32, "cpu")
    group: Any = dist.group.WORLD
    transfer, checks = CollectiveTransfer(group), Checks(group, 1)
    move_s, compare_s, vote_s = [], [], []
    for turn in range(ROUNDS):
        target = Layout.TP if turn % 2 == 0 else Layout.EP
        blocks = expert_blocks(shape, RANKS, target)
        for layer in layer_order(target, layers):
            views = [dict(zip(("w13", "w2"), arena.experts(at, layer), strict=True)) for at in (other(target), target)]
            move = LayerMove(layer, *views)
            move_s.append(_timed(lambda b=blocks, m=move: transfer.move_layers(b, [m])))
            compare_s.append(_timed(lambda b=blocks, m=move: checks.compare(b, m)))
        vote_s.append(_timed(lambda: agree(None, group)))
    if rank == 0:
        layer_ms, compare_ms, vote_ms = (1e3 * statistics.median(times) for times in (move_s, compare_s, vote_s))
        sender.send(
            {
                "layers": layers,
                "layer_bytes": sum(view.nbytes for view in arena.experts(Layout.EP, 0)),
                "move_ms_a_layer": layer_ms,
                "compare_ms_a_layer": compare_ms,
                "vote_ms": vote_ms,
                "sums_share": compare_ms / EVERY / layer_ms,
                "vote_share": vote_ms / (layers * layer_ms),
            }
        )
    dist.destroy_process_group()


def _timed(work) -> float:
    dist.barrier()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)
