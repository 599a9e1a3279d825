"""Engine benchmark on a CPU: our engine pinned to a layout against stock SGLang, a switch, the control plane.

    python scripts/bench_engine.py --out benchmarks/engine_cpu.json

Everything is a ratio between rivals of one run, or a time of code that needs no model; medians throughout. A machine's
speed drifts over the minutes that this takes, so all engines are up and take turns, a batch each; whoever waits is
stopped (SIGSTOP), because an idle SGLang scheduler polls without a pause. A second stock engine is the control: how far
its ratio lies from 1 is what the machine and an engine's start do to it.
"""

import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import psutil
import typer
from bench_control import control_ms

from moebius_engine.config import SwitchConfig
from moebius_engine.sglang.cpu import environment

RANKS, REQUESTS, TOKENS = 2, 32, 64
COUNTS = [32, 128, 512, 2048]
SWITCHES = 10
STOPPED_S = 3600.0  # whoever waits shows no sign of life


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")] = Path("benchmarks/engine_cpu.json"),
    pairs: Annotated[int, typer.Option(min=1, help="timed batches of each engine")] = 24,
) -> None:
    environment.prepare(RANKS)
    control = control_ms(COUNTS)
    # The dearer way is the one that counts.
    report: dict = {"control_ms": control["to_tp"], "control_to_ep_ms": control["to_ep"]}
    from recipes.tiny_moe import make_tiny_moe

    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny_moe(Path(folder) / "tiny"))
        for layout in ("ep", "tp"):
            report |= _compare(model, layout, pairs)
    report["switch_steps"] = report["switch_ms"] / report["decode_step_ms"]
    report["setting"] = _setting(pairs)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    typer.echo(json.dumps(report, indent=2))


def _compare(model: str, layout: str, pairs: int) -> dict:
    static = SwitchConfig(policy="off", static_layout=layout, silent_s=STOPPED_S)
    contestants: dict[str, Contestant] = {}
    try:
        for name, config in (
            ("stock", static),
            ("ours", SwitchConfig(policy=layout, silent_s=STOPPED_S)),
            ("control", static),
        ):
            contestants[name] = Contestant(model, config)
        rates = []
        for turn in range(pairs):
            order = list(contestants)[:: 1 if turn % 2 == 0 else -1]
            rates.append({name: contestants[name].tokens_per_s() for name in order})
        found: dict = {
            f"{layout}_ratio": statistics.median(rate["ours"] / rate["stock"] for rate in rates),
            f"{layout}_control_ratio": statistics.median(rate["control"] / rate["stock"] for rate in rates),
            f"{layout}_tokens_per_s": {name: statistics.median(rate[name] for rate in rates) for name in contestants},
        }
        if layout == "ep":
            with contestants["ours"].running() as engine:
                found["switch_ms"] = statistics.median(_switches(engine))
            found["decode_step_ms"] = 1e3 * REQUESTS / found["ep_tokens_per_s"]["ours"]
        return found
    finally:
        for contestant in contestants.values():
            contestant.shutdown()


class Contestant:
    """An engine that is stopped unless it is its turn."""

    def __init__(self, model: str, switch: SwitchConfig):
        from moebius_engine.engine import SwitchingEngine

        others = set(psutil.Process().children(recursive=True))
        self._engine = SwitchingEngine(model, ranks=RANKS, switch=switch, max_running_requests=64)
        self._processes = set(psutil.Process().children(recursive=True)) - others
        for _ in range(2):
            _tokens_per_s(self._engine)
        self._stop()

    def _stop(self) -> None:
        for process in self._processes:
            process.suspend()

    @contextmanager
    def running(self) -> Iterator:
        for process in self._processes:
            process.resume()
        yield self._engine
        self._stop()

    def tokens_per_s(self) -> float:
        with self.running() as engine:
            return _tokens_per_s(engine)

    def shutdown(self) -> None:
        for process in self._processes:
            process.resume()
        self._engine.shutdown()


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


def _setting(pairs: int) -> dict:
    return {
        "machine": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "ranks": RANKS,
        "requests": REQUESTS,
        "tokens": TOKENS,
        "pairs": pairs,
        "model": "Qwen3-MoE, 4 layers, 8 experts, random weights, fp32 (recipes/tiny_moe.py)",
        "versions": {name: version(name) for name in ("sglang", "torch", "transformers")},
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    typer.run(main)
