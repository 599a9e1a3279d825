"""Two runs of the tiny training loop as one benchmark: with switching, and pinned to EP with the same seeds.

moebius-rollout train --tiny --out runs/train_switching
moebius-rollout train --tiny --policy ep --out runs/train_ep
python scripts/bench_grpo.py runs/train_switching runs/train_ep benchmarks/grpo_tiny.json
"""

import json
import os
from datetime import date
from importlib.metadata import version
from pathlib import Path

import typer


def main(switching: Path, static: Path, out: Path) -> None:
    """Write OUT from the steps.json of both runs. Fails if they differ in length."""
    runs = [json.loads((folder / "steps.json").read_text(encoding="utf-8")) for folder in (switching, static)]
    pairs = list(zip(*runs, strict=True))
    thirds = max(1, len(pairs) // 3)
    rewards = [step["reward_mean"] for step, _ in pairs]
    report = {
        "setting": {
            "hardware": f"CPU, {len(os.sched_getaffinity(0))} cores",
            "model": "recipes/tiny_arithmetic/checkpoint, 0.2 million parameters, fp32",
            "ranks": 2,
            "versions": {name: version(name) for name in ("verl", "sglang", "torch", "ray")},
            "date": date.today().isoformat(),
        },
        "reward_first_third": sum(rewards[:thirds]) / thirds,
        "reward_last_third": sum(rewards[-thirds:]) / thirds,
        "probs_diff_max": max(step["probs_diff_max"] for step, _ in pairs),
        "reward_difference_max": max(abs(step["reward_mean"] - other["reward_mean"]) for step, other in pairs),
        "steps": [step for step, _ in pairs],
        "steps_without_switching": [other for _, other in pairs],
    }
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    summary = {name: value for name, value in report.items() if name.startswith(("reward", "probs"))}
    typer.echo(json.dumps(summary))


if __name__ == "__main__":
    typer.run(main)
