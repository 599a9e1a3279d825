"""What a dead engine costs, and what it costs to be prepared: two CPU ranks, a tiny model.

Kills or stops rank 1 in mid-decode, and measures how long it takes until that is noticed, until the next engine has
taken its first forward step for the requests, and whether all of them end with the tokens of an undisturbed run. And
compares the tokens/s with the journal fed every 50 tokens, as it is, with those without it, in one engine.

    python scripts/bench_recovery.py --out benchmarks/recovery_cpu.json
"""

import asyncio
import json
import os
import platform
import signal
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

RANKS, REQUESTS, TOKENS = 2, 8, 100
MANY, SHORT = 64, 101  # requests and tokens of the comparison: two bundles each
SETTINGS = {"skip_tokenizer_init": True, "random_seed": 0, "context_length": 1024}


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """A rank that can be told how often to report unfinished requests."""
    from sglang.srt.managers import scheduler_output_processor_mixin as mixin

    from moebius_engine.sglang import commands, process

    def report_every(scheduler: Any, tokens: int) -> dict[str, Any]:
        mixin.DEFAULT_FORCE_STREAM_INTERVAL = tokens
        return {}

    commands._HANDLERS["report_every"] = report_every
    process.run_scheduler(*args, **kwargs)


def requests(count: int, tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": tokens}
    return {"prompts": [[20 + row % 400, row // 400 + 1, *range(30, 36)] for row in range(count)], "sampling": sampling}


async def recovery(actor: Any, how: signal.Signals, expected: list[list[int]]) -> dict[str, Any]:
    engine, ids = actor._keeper.engine, [f"{how.name}-{row}" for row in range(REQUESTS)]
    batch = asyncio.ensure_future(actor.generate_batch(**requests(REQUESTS, TOKENS), request_ids=ids))
    while not all(engine.so_far(rid)[0] for rid in ids):
        await asyncio.sleep(0.01)
    began = time.monotonic()
    os.kill(engine.vitals[1].pid, how)
    error = str(await engine.async_wait_dead())
    noticed = time.monotonic()
    while (fresh := actor._keeper.engine) is None:
        await asyncio.sleep(0.01)
    ready = time.monotonic()
    while not any(rank["forward_ct"] for rank in (await fresh.async_health())["ranks"]):
        await asyncio.sleep(0.01)
    first = time.monotonic()
    samples = [sample for (sample,) in await batch]
    tokens = [sample.output_ids for sample in samples]
    return {
        "detection_s": noticed - began,
        "restart_s": ready - noticed,
        "restart_to_first_token_s": first - noticed,
        "error": error,
        "resumed": sum(sample.resumed for sample in samples),
        "lost": sum(len(row) != TOKENS for row in tokens),
        "tokens_equal": tokens == expected,
    }


async def journal_ratio(actor: Any, pairs: int) -> dict[str, Any]:
    """Tokens/s with reports of unfinished requests, by those without: the median of the pairs' ratios."""

    async def rate(every: int) -> float:
        await actor._keeper.engine._command("report_every", tokens=every)
        began = time.monotonic()
        await actor.generate_batch(**requests(MANY, SHORT))
        return MANY * SHORT / (time.monotonic() - began)

    await rate(50)
    rates = []
    for pair in range(pairs):
        order = (50, 1 << 30) if pair % 2 else (1 << 30, 50)
        measured = {every: await rate(every) for every in order}
        rates.append((measured[50], measured[1 << 30]))
    ratios = [with_it / without for with_it, without in rates]
    return {
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "tokens_per_s": statistics.median(with_it for with_it, _ in rates),
        "requests": MANY,
        "tokens": SHORT,
        "pairs": pairs,
    }


async def measure(model: str, pairs: int) -> dict[str, Any]:
    from moebius_engine import engine
    from rollout.actor import RolloutActor

    engine.run_scheduler = run_scheduler
    actor = RolloutActor(
        model, ranks=RANKS, switch={"policy": "ep", "timeout_s": 120}, server_args=SETTINGS, recovery={"backoff_s": 0}
    )
    try:
        expected = [sample.output_ids for (sample,) in await actor.generate_batch(**requests(REQUESTS, TOKENS))]
        found: dict[str, Any] = {}
        for name, how in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            found[name] = await recovery(actor, how, expected)
            print(name, found[name], flush=True)
        found["journal"] = await journal_ratio(actor, pairs)
        return {
            **found,
            "setting": {
                "machine": platform.machine(),
                "cores": os.cpu_count(),
                "ranks": RANKS,
                "requests": REQUESTS,
                "tokens": TOKENS,
                "versions": {name: version(name) for name in ("sglang", "torch")},
                "python": platform.python_version(),
            },
        }
    finally:
        actor.shutdown()


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("benchmarks/recovery_cpu.json"),
    pairs: Annotated[int, typer.Option(help="Pairs of batches of the journal's comparison.")] = 5,
) -> None:
    from recipes.tiny_moe import make_tiny_moe

    model = make_tiny_moe(Path("runs/bench_recovery"))
    found = asyncio.run(measure(str(model), pairs))
    out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    typer.run(main)
