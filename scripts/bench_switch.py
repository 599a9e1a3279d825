"""A switch on real GPUs: SGLang with both CUDA-graph sets, dummy weights, requests in flight at every switch.

    python scripts/bench_switch.py --ranks 2 --requests 32 --requests 512 --share-gpu --out benchmarks/switch_h200.json

--share-gpu puts all ranks on one GPU, which needs MPS and NCCL 2.32 or later. It shows what the mechanism costs, and
says nothing about NVLink.
"""

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from gpu_engine import server_args, setting, write_model

from moebius_engine.config import SwitchConfig
from moebius_engine.engine import SwitchingEngine

PROMPT = 65  # tokens
WARM_UP = 2  # switches that are not counted: kernels compile, buffers grow
PHASES = ("decide_ms", "metadata_ms", "kv_ms", "weights_ms", "rest_ms", "total_ms")


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    layers: Annotated[int, typer.Option(min=1)] = 8,
    requests: Annotated[list[int], typer.Option(help="in flight at every switch; may be given several times")] = [32],  # noqa: B006
    samples: Annotated[list[int], typer.Option(help="requests that share a prompt, for each --requests")] = [1],  # noqa: B006
    tokens: Annotated[int, typer.Option(min=1, help="tokens a response")] = 1500,
    switches: Annotated[int, typer.Option(min=2, help="counted ones, after two that warm up")] = 20,
    transfer: Annotated[str, typer.Option(help="direct, collective or auto")] = "auto",
    share_gpu: Annotated[bool, typer.Option("--share-gpu", help="all ranks on GPU 0")] = False,
) -> None:
    if len(samples) not in (1, len(requests)):
        raise typer.BadParameter(
            f"{len(samples)} numbers of samples for {len(requests)} of requests; give one or as many"
        )
    most = max(requests)
    sizes = {size for count in requests for size in (-(-count // ranks), count)}
    with tempfile.TemporaryDirectory() as folder:
        engine = SwitchingEngine(
            write_model(folder, layers),
            ranks=ranks,
            switch=SwitchConfig(policy="ep", transfer=transfer, share_gpu=share_gpu, timeout_s=60),
            **server_args(batch_sizes=sizes, requests=most, tokens=most * (PROMPT + tokens + 1)),
        )
        held, rows = setting(ranks, layers, share_gpu, transfer=transfer, **{"tokens a response": tokens}), []
        try:
            for count, shared in zip(requests, samples * (len(requests) // len(samples)), strict=True):
                rows.append(engine.loop.run_until_complete(_measure(engine, count, shared, tokens, switches)))
                out.write_text(json.dumps({"setting": held, "rows": rows}, indent=2) + "\n", encoding="utf-8")
                typer.echo(json.dumps({key: rows[-1][key] for key in ("requests", "samples", "median_ms")}))
        finally:
            engine.shutdown()


async def _measure(engine: SwitchingEngine, requests: int, samples: int, tokens: int, switches: int) -> dict:
    """Switch to and fro while one batch is decoded, of `samples` requests a prompt."""
    greedy = {"temperature": 0, "ignore_eos": True}
    prompts = [[1 + row // samples, *range(20, 19 + PROMPT)] for row in range(requests)]
    # The first prefill of a shape compiles kernels.
    await engine.async_generate(input_ids=prompts, sampling_params={**greedy, "max_new_tokens": 8})
    began = time.perf_counter()
    batch = asyncio.ensure_future(
        engine.async_generate(input_ids=prompts, sampling_params={**greedy, "max_new_tokens": tokens})
    )
    await asyncio.sleep(1)  # until all are decoded
    records = []
    for turn in range(WARM_UP + switches):
        record = await engine.async_switch("tp" if turn % 2 == 0 else "ep")
        if record is None or record.refused or record.running != requests:
            raise RuntimeError(f"not a switch of {requests} running requests: {record}; give more --tokens")
        if turn >= WARM_UP:
            records.append(record.model_dump())
        await asyncio.sleep(0.1)
    answers = await batch
    return {
        "requests": requests,
        "samples": samples,
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


if __name__ == "__main__":
    typer.run(main)
