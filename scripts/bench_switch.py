"""A switch on real GPUs: SGLang with both CUDA-graph sets, dummy weights, requests in flight at every switch.

    python scripts/bench_switch.py --ranks 2 --layers 8 --requests 32 --requests 512 --share-gpu \
        --out benchmarks/switch_h200.json
    python scripts/bench_switch.py --ranks 2 --requests 128 --kv-tokens 400000 --occupancy 0.05 --occupancy 0.5

--occupancy fills that share of the KV cache with longer prompts. --share-gpu puts all ranks on one GPU, which needs MPS
and NCCL 2.32 or later: it shows what the mechanism costs, and says nothing about NVLink. Writes the JSON file after
each row, with what each component of rank 0's memory takes beside its budget, and a PNG at the end.
"""

import asyncio
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from bench_switch_plot import save_png
from gpu_engine import MODEL, server_args, setting, tokens_per_rank, write_model

from moebius_engine.calibration.measure import until_all_decode
from moebius_engine.config import SwitchConfig
from moebius_engine.engine import SwitchingEngine
from moebius_engine.memory.budget import GB, Sizes, budget, requests_per_rank

PROMPT = 65  # tokens, where no occupancy asks for more
WARM_UP = 2  # switches that are not counted: kernels compile, buffers grow
PHASES = ("decide_ms", "metadata_ms", "kv_ms", "weights_ms", "rest_ms", "total_ms")
WRITTEN = ("target", "running", "kv_tokens", "kv_bytes", "weight_bytes", *PHASES, "checks_ms")  # of a switch's record


class Row(NamedTuple):
    """samples: requests that share a prompt. prompt, tokens: of a request, and of its response."""

    requests: int
    samples: int
    prompt: int
    tokens: int
    switches: int


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    model: Annotated[str, typer.Option(help="a published model's name, for its sizes")] = MODEL,
    layers: Annotated[int | None, typer.Option(min=1, help="the model's if left out")] = None,
    requests: Annotated[list[int], typer.Option(help="in flight at every switch; may be given several times")] = [32],  # noqa: B006
    samples: Annotated[list[int], typer.Option(help="requests that share a prompt, for each --requests")] = [1],  # noqa: B006
    kv_tokens: Annotated[int | None, typer.Option(min=1, help="that a rank holds in EP; what rows need if not")] = None,
    occupancy: Annotated[list[float] | None, typer.Option(help="share of the KV tokens, each a row")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="tokens a response")] = 1500,
    switches: Annotated[int, typer.Option(min=2, help="counted ones, after two that warm up")] = 20,
    transfer: Annotated[str, typer.Option(help="direct, collective or auto")] = "auto",
    share_gpu: Annotated[bool, typer.Option("--share-gpu", help="all ranks on GPU 0")] = False,
    changes: Annotated[list[str], typer.Option("--set", help="argument=value of SGLang's server")] = [],  # noqa: B006
) -> None:
    if len(samples) not in (1, len(requests)):
        raise typer.BadParameter(
            f"{len(samples)} numbers of samples for {len(requests)} of requests; give one or as many"
        )
    if (kv_tokens is None) != (occupancy is None):
        raise typer.BadParameter(f"--kv-tokens {kv_tokens} and --occupancy {occupancy}: give both or neither")
    most = max(requests)
    if kv_tokens is None:
        kv_tokens = tokens_per_rank(most, PROMPT + tokens + 1, ranks)
    rows = [
        Row(count, shared, _prompt(share, kv_tokens * ranks // count, tokens), tokens, switches)
        for count, shared in zip(requests, samples * (len(requests) // len(samples)), strict=True)
        for share in occupancy or [0.0]
    ]
    report: dict[str, Any] = {
        "setting": setting(
            ranks, model, layers, share_gpu, changes, transfer=transfer, **{"KV tokens a rank": kv_tokens}
        ),
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        engine = SwitchingEngine(
            write_model(folder, model, layers),
            ranks=ranks,
            switch=SwitchConfig(policy="ep", transfer=transfer, share_gpu=share_gpu, timeout_s=60),
            **server_args(requests, ranks, kv_tokens, share_gpu, changes),
        )
        try:
            report["memory of rank 0 [GB]"] = _memory(engine, kv_tokens)
            for row in rows:
                report["rows"].append(engine.loop.run_until_complete(_measure(engine, row)))
                out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                typer.echo(
                    json.dumps({key: report["rows"][-1][key] for key in (*Row._fields, "median_ms", "checks_share")})
                )
        finally:
            engine.shutdown()
    save_png(report, out.with_suffix(".png"))


def _prompt(occupancy: float, room: int, tokens: int) -> int:
    """Tokens of a prompt, so that half-way through its response a request fills this share of its room."""
    longest = room - tokens - 1
    wanted = max(PROMPT, round(occupancy * room) - tokens // 2)
    if wanted > longest:
        raise typer.BadParameter(
            f"--occupancy {occupancy}: prompts of {wanted} tokens and {tokens} more, but a request has room for "
            f"{room}; give fewer --tokens or more --kv-tokens"
        )
    return wanted


def _memory(engine: SwitchingEngine, kv_tokens: int) -> dict[str, dict[str, float | None]]:
    """Each component: measured, and as `moebius-rollout budget` says."""
    context = engine.context_len
    per_rank = requests_per_rank(engine.server_args.max_running_requests, kv_tokens, context, engine.ranks)
    sizes = Sizes(engine.shape, engine.ranks, kv_tokens, per_rank, context, context, itemsize=2, kv_itemsize=2)
    planned = {component.key: component.nbytes / GB for component in budget(sizes).components}
    measured = {key: nbytes / GB for key, nbytes in engine.memory()[0].items()}
    return {
        key: {"measured": measured.get(key), "budget": planned.get(key)}
        for key in (*planned, *(measured.keys() - planned.keys()))
    }


async def _measure(engine: SwitchingEngine, row: Row) -> dict[str, Any]:
    """Switch to and fro while one batch is decoded."""
    greedy = {"temperature": 0, "ignore_eos": True}
    filler = list(itertools.islice(itertools.cycle(range(20, 20_000)), row.prompt - 1))
    prompts = [[1 + number // row.samples, *filler] for number in range(row.requests)]
    # The first prefill of a shape compiles kernels; the second finds its prefixes cached.
    await engine.async_generate(input_ids=prompts, sampling_params={**greedy, "max_new_tokens": 8})
    began = time.perf_counter()
    batch = asyncio.ensure_future(
        engine.async_generate(input_ids=prompts, sampling_params={**greedy, "max_new_tokens": row.tokens})
    )
    await until_all_decode(engine, row.requests, batch)
    records = []
    for turn in range(WARM_UP + row.switches):
        record = await engine.async_switch("tp" if turn % 2 == 0 else "ep")
        if record is None or record.refused or record.running != row.requests:
            raise RuntimeError(f"not a switch of {row.requests} running requests: {record}; give more --tokens")
        if turn >= WARM_UP:
            records.append(record.model_dump())
        await asyncio.sleep(0.1)
    answers = await batch
    return {
        **row._asdict(),
        "median_ms": {
            way: {phase: statistics.median(r[phase] for r in records if r["target"] == way) for phase in PHASES}
            for way in ("tp", "ep")
        },
        # Few switches hold a comparison, so a median would not show it.
        "checks_share": sum(r["checks_ms"] for r in records) / sum(r["total_ms"] for r in records),
        "tokens_arrived": sum(len(answer["output_ids"]) for answer in answers),
        "tokens_expected": row.requests * row.tokens,
        "batch_s": time.perf_counter() - began,
        "records": [{key: r[key] for key in WRITTEN} for r in records],
    }


if __name__ == "__main__":
    typer.run(main)
