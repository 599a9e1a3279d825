"""Engine benchmark on a CPU: our engine pinned to a layout against stock SGLang, a switch, the control plane.

    python scripts/bench_engine.py --out benchmarks/engine_cpu.json

Everything is a ratio between rivals of one run, or a time of code that needs no model; medians throughout. Stock and
ours take turns (stock, ours, ours, stock, ...), because a machine's speed drifts over the minutes that this takes.
"""

import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from bench_control import control_ms

from moebius_engine.config import SwitchConfig
from moebius_engine.sglang.cpu import environment

RANKS, REQUESTS, TOKENS = 2, 32, 64
COUNTS = [32, 128, 512, 2048]
SWITCHES = 10


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")] = Path("benchmarks/engine_cpu.json"),
    rounds: Annotated[int, typer.Option(min=1, help="pairs of engine starts a layout")] = 2,
    runs: Annotated[int, typer.Option(min=1, help="timed batches an engine start")] = 7,
) -> None:
    environment.prepare(RANKS)
    control = control_ms(COUNTS)
    # The dearer way is the one that counts.
    report: dict = {"control_ms": control["to_tp"], "control_to_ep_ms": control["to_ep"]}
    from recipes.tiny_moe import make_tiny_moe

    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny_moe(Path(folder) / "tiny"))
        switches: list[float] = []
        steps: list[float] = []
        for layout in ("ep", "tp"):
            rates: dict[str, list[float]] = {"stock": [], "ours": []}
            for turn in range(rounds):
                for who in ("stock", "ours") if turn % 2 == 0 else ("ours", "stock"):
                    engine = _start(model, who, layout)
                    try:
                        rates[who] += [_tokens_per_s(engine) for _ in range(runs)]
                        if who == "ours" and layout == "ep":
                            times = _switches(engine)
                            switches += times
                            steps += [1e3 * REQUESTS / rate for rate in rates[who][-runs:]]
                    finally:
                        engine.shutdown()
            medians = {who: statistics.median(values) for who, values in rates.items()}
            report[f"{layout}_ratio"] = medians["ours"] / medians["stock"]
            report[f"{layout}_tokens_per_s"] = medians
    report["switch_ms"] = statistics.median(switches)
    report["decode_step_ms"] = statistics.median(steps)
    report["switch_steps"] = report["switch_ms"] / report["decode_step_ms"]
    report["setting"] = _setting(rounds, runs)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    typer.echo(json.dumps(report, indent=2))


def _start(model: str, who: str, layout: str):
    from moebius_engine.engine import SwitchingEngine

    switch = SwitchConfig(policy="off", static_layout=layout) if who == "stock" else SwitchConfig(policy=layout)
    engine = SwitchingEngine(model, ranks=RANKS, switch=switch, max_running_requests=64)
    for _ in range(2):
        _tokens_per_s(engine)
    return engine


def _request() -> dict:
    return {
        "input_ids": [[1 + row, *range(20, 36)] for row in range(REQUESTS)],
        "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS},
    }


def _tokens_per_s(engine) -> float:
    engine.flush_cache()
    began = time.perf_counter()
    engine.generate(**_request())
    return REQUESTS * TOKENS / (time.perf_counter() - began)


def _switches(engine) -> list[float]:
    """Milliseconds of switches with all requests in flight, both ways."""

    async def go() -> list[float]:
        request = _request()
        request["sampling_params"]["max_new_tokens"] = 400
        batch = asyncio.ensure_future(engine.async_generate(**request))
        times = []
        await asyncio.sleep(0.5)
        for turn in range(SWITCHES):
            record = await engine.async_switch("tp" if turn % 2 == 0 else "ep")
            if record.running != REQUESTS or record.refused:
                raise RuntimeError(f"{record.running} of {REQUESTS} requests were running at a switch: {record}")
            times.append(record.total_ms)
            await asyncio.sleep(0.1)
        await engine.async_abort(abort_all=True)
        await batch
        return times

    return engine.loop.run_until_complete(go())


def _setting(rounds: int, runs: int) -> dict:
    return {
        "machine": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "ranks": RANKS,
        "requests": REQUESTS,
        "tokens": TOKENS,
        "rounds": rounds,
        "runs": runs,
        "model": "Qwen3-MoE, 4 layers, 8 experts, random weights, fp32 (recipes/tiny_moe.py)",
        "versions": {name: version(name) for name in ("sglang", "torch", "transformers")},
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    typer.run(main)
