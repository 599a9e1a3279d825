"""How much of their prompts GRPO's samples find in the prefix cache, with switches and without.

    python scripts/bench_prefix.py --out benchmarks/prefix_cpu.json

A step is eight prompts with n = 8 samples each, all sent at once: more than there are places, so later samples start
while others decode. A hit is a prompt token whose KV was in the cache when its request started.
"""

import asyncio
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from moebius_engine.config import SwitchConfig
from moebius_engine.sglang.cpu import environment

PROMPTS, SAMPLES, PROMPT_TOKENS, PLACES = 8, 8, 200, 24
STEPS = 5  # forward steps between two switches, or more
SWITCHES = {"none": [], "to TP": ["tp"], "to TP and back": ["tp", "ep"], "twice there and back": ["tp", "ep"] * 2}


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")] = Path("benchmarks/prefix_cpu.json"),
    repeats: Annotated[int, typer.Option(min=1, help="steps of each kind; the mean counts")] = 5,
) -> None:
    environment.prepare(2)
    from moebius_engine.engine import SwitchingEngine
    from recipes.tiny_moe import make_tiny_moe

    with tempfile.TemporaryDirectory() as folder:
        engine = SwitchingEngine(
            str(make_tiny_moe(Path(folder) / "tiny")),
            ranks=2,
            switch=SwitchConfig(policy="ep"),
            max_running_requests=PLACES,
            max_total_tokens=8192,
            context_length=512,
        )
        rates: dict[str, list[float]] = {}
        for kind, layouts in SWITCHES.items():
            for _ in range(repeats):
                engine.switch("ep")
                engine.flush_cache()
                rates.setdefault(kind, []).append(hit_rate(engine._run(one_step(engine, layouts))))
        engine.shutdown()
    means = {kind: sum(values) / len(values) for kind, values in rates.items()}
    report = {
        "hit_rate": means,
        "least_of_none": min(means.values()) / means["none"],
        "of_each_step": rates,
        "setting": {
            "ranks": 2,
            "prompts": PROMPTS,
            "samples": SAMPLES,
            "prompt_tokens": PROMPT_TOKENS,
            "max_running_requests": PLACES,
            "steps_between_switches": STEPS,
            "sglang": version("sglang"),
        },
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    typer.echo(json.dumps(report, indent=2))


async def one_step(engine, layouts: list[str]) -> list[dict[str, Any]]:
    """The answers of one step, with switches to `layouts` while requests decode and wait. Raises RuntimeError if a
    switch finds nothing that decodes and waits."""
    prompts = [[number, *range(10, 9 + PROMPT_TOKENS)] for number in range(PROMPTS)]
    lengths = [{"temperature": 0, "ignore_eos": True, "max_new_tokens": 24 + sample} for sample in range(SAMPLES)]
    rows = [prompt for prompt in prompts for _ in lengths]
    task = asyncio.ensure_future(engine.async_generate(input_ids=rows, sampling_params=lengths * PROMPTS))
    for layout in layouts:
        target = (await engine.async_health())["ranks"][0]["forward_ct"] + STEPS
        while (await engine.async_health())["ranks"][0]["forward_ct"] < target and not task.done():
            await asyncio.sleep(0.002)
        record = await engine.async_switch(layout)
        if record.refused or not record.running or not record.waiting:
            raise RuntimeError(f"no switch with requests that decode and wait: {record}")
    return await task


def hit_rate(answers: list[dict[str, Any]]) -> float:
    """Share of prompt tokens that came from the cache."""
    counts = [answer["meta_info"] for answer in answers]
    return sum(count["cached_tokens"] for count in counts) / sum(count["prompt_tokens"] for count in counts)


if __name__ == "__main__":
    typer.run(main)
