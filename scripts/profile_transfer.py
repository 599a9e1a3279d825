"""The copy kernel without MPS and NCCL: all ranks in one process on one GPU, to see what it loses, and where.

    python scripts/profile_transfer.py --out benchmarks/transfer_profile_h200.json
    ncu --clock-control none --kernel-name regex:move_ --section SpeedOfLight \\
        python scripts/profile_transfer.py --alone 8 --layers 2

The first times whole switches, fences included, as bench_transfer.py does with a process a rank: the difference between
the two is what processes and MPS cost. The second runs rank 0's part only, once to TP and once to EP, weights and KV.
Its fences are open, since ncu runs one kernel at a time, and a rank that waits for its peers would wait for ever.
"""

import json
import os
import statistics
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from bench_transfer_peer import copy_gbs
from bench_transfer_rank import WARM_UP, Job, Sizes, arrived, expert_jobs, filled_arena, kv_jobs, moved, same

from moebius_engine.layout import Layout
from moebius_engine.memory.arena import Arena
from moebius_engine.memory.vmm import VmmMemory
from moebius_engine.transfer.direct import FENCE_TAG, DirectTransfer

TIMEOUT_S = 5.0
QUEUES = "32"  # hardware queues: with fewer than streams, a rank that waits would keep out the one that it waits for
AHEAD_CYCLES = 400_000_000  # the GPU starts when the host has enqueued everything, 0.2 s later


class OneProcess:
    """As Peers, for ranks whose memories all lie in this process. is_open: this rank raises all ranks' flags."""

    def __init__(self, memories: list[VmmMemory], rank: int, is_open: bool):
        self.memory, self.rank, self.ranks = memories[rank], rank, len(memories)
        self.sharing = 1 if is_open else self.ranks
        self._memories, self._is_open = memories, is_open

    def connect(self) -> None:
        pass

    def address(self, rank: int, own: int) -> int:
        segment = self.memory.segment_of(own)
        if self._is_open and segment.tag == FENCE_TAG:
            return own + 8 * (rank - self.rank)
        return self._memories[rank].address(segment) + own - self.memory.address(segment)


class VirtualRank(NamedTuple):
    transfer: DirectTransfer
    jobs: dict[str, dict[Layout, Job]]
    stream: torch.cuda.Stream
    arena: Arena


def main(
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
    alone: Annotated[int | None, typer.Option(min=2, help="P: only rank 0's kernels, for ncu")] = None,
    ranks: Annotated[list[int], typer.Option(min=2, help="P; may be given several times")] = [2, 4, 8],  # noqa: B006
    layers: Annotated[int, typer.Option(min=1)] = 8,
    experts: Annotated[int, typer.Option(min=8)] = 128,
    tokens: Annotated[int, typer.Option(min=8, help="live tokens over all ranks")] = 65536,
    repeats: Annotated[int, typer.Option(min=1, help="timed switches a direction")] = 20,
) -> None:
    if (out is None) == (alone is None):
        raise typer.BadParameter(f"--out {out} and --alone {alone}: give one of them")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = QUEUES
    sizes = Sizes(layers, experts, tokens, repeats, nccl=False)
    if alone is not None:
        (first, *_) = _make(alone, sizes, is_open=True)
        for what, jobs in first.jobs.items():
            for target in (Layout.TP, Layout.EP):
                first.transfer.move_layers(*jobs[target])
                first.transfer.finish()
                typer.echo(f"{what} to {target}: {moved(jobs, first.arena)[target.value] / alone:.0f} bytes")
        return
    assert out is not None
    copy = copy_gbs(repeats)
    rows = []
    for count in ranks:
        made = _make(count, sizes, is_open=False)
        for what in ("weights", "kv"):
            for target, ms in _times(made, what, repeats).items():
                nbytes = moved(made[0].jobs[what], made[0].arena)[target.value]
                gbs = round(nbytes / ms / 1e6, 1)
                rows.append(
                    {"ranks": count, "what": what, "target": target.value, "ms": round(ms, 3), "direct_gbs": gbs}
                    | {"of_copy": round(gbs / copy, 3)}
                )
                typer.echo(json.dumps(rows[-1]))
        memories = [rank.arena.memory for rank in made]
        del made
        for memory in memories:
            memory.close()
    out.write_text(json.dumps({"setting": _setting(sizes, copy), "rows": rows}, indent=1) + "\n", encoding="utf-8")


def _make(ranks: int, sizes: Sizes, is_open: bool) -> list[VirtualRank]:
    made = []
    memories = [VmmMemory(0) for _ in range(ranks)]
    arenas = [filled_arena(rank, ranks, sizes, memory) for rank, memory in enumerate(memories)]
    for rank, arena in enumerate(arenas):
        peers: Any = OneProcess(memories, rank, is_open)
        transfer = DirectTransfer(peers, TIMEOUT_S)
        jobs = {"weights": expert_jobs(arena), "kv": kv_jobs(arena, rank, sizes.tokens)}
        for job in (*jobs["weights"].values(), *jobs["kv"].values()):
            transfer.prepare(*job)
        made.append(VirtualRank(transfer, jobs, torch.cuda.Stream(), arena))
    torch.cuda.synchronize()
    return made


def _times(made: list[VirtualRank], what: str, repeats: int) -> dict[Layout, float]:
    """Milliseconds of a switch, the slowest rank's: median. Raises RuntimeError if there and back changes a byte."""
    before = _bytes(made, what)
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD_CYCLES)
    start = torch.cuda.Event()
    start.record()
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []
    for turn in range(2 * (WARM_UP + repeats)):
        target, marked = (Layout.TP, Layout.EP)[turn % 2], []
        for rank in made:
            with torch.cuda.stream(rank.stream):
                rank.stream.wait_event(start)
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                rank.transfer.move_layers(*rank.jobs[what][target])
                ended.record()
            marked.append((began, ended))
        marks.append(marked)
    for rank in made:
        with torch.cuda.stream(rank.stream):
            rank.transfer.finish()
    torch.cuda.synchronize()
    if not same(_bytes(made, what), before):
        raise RuntimeError(f"{what}, P = {len(made)}: there and back changed bytes")
    spent = [max(began.elapsed_time(ended) for began, ended in marked) for marked in marks[2 * WARM_UP :]]
    return {Layout.TP: statistics.median(spent[::2]), Layout.EP: statistics.median(spent[1::2])}


def _bytes(made: list[VirtualRank], what: str) -> list[torch.Tensor]:
    """What all ranks hold of the first and last layer in EP."""
    return [part for number, rank in enumerate(made) for part in arrived(rank.jobs[what][Layout.EP], number)]


def _setting(sizes: Sizes, copy: float) -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "ranks": "in one process on one GPU, a stream each",
        "versions": {name: version(name) for name in ("torch", "cuda-bindings")},
        "date": date.today().isoformat(),
        "model": f"{sizes.layers} layers, {sizes.experts} experts, H 2048, I 768, 4 KV heads, D 128, bf16",
        "live_tokens": sizes.tokens,
        "page_size": 1,
        "repeats": sizes.repeats,
        "copy_gbs": copy,
    }


if __name__ == "__main__":
    typer.run(main)
