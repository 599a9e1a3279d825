"""`moebius-rollout train --tiny`: GRPO with verl on a tiny model, on any machine."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout.failure import check_policy, fail

RECIPE = "tiny_arithmetic"
POLICIES = ("rollout", "interactive", "ep", "tp")  # "off" is stock SGLang, which verl runs as rollout.name=sglang
COLUMNS = {
    "reward_mean": "critic/score/mean",
    "probs_diff_max": "training/rollout_probs_diff_max",
    "switches": "moebius/switches",
    "inflight_at_switch": "moebius/inflight_at_switch",
    "longest_response": "response_length/max",
    "step_s": "timing_s/step",
}
"""Columns of a step → names in verl's step line."""


def train_command(
    tiny: Annotated[bool, typer.Option("--tiny", help="The tiny model; others are trained by their recipes.")] = False,
    steps: Annotated[int, typer.Option(help="GRPO steps.")] = 12,
    policy: Annotated[str, typer.Option(help="Policy of the engine; rollout switches, ep and tp do not.")] = "rollout",
    out: Annotated[Path, typer.Option(help="Folder for data, log and steps.json.")] = Path("runs/train"),
    timeout_s: Annotated[int, typer.Option(help="Seconds after which the run is ended.")] = 1500,
) -> None:
    """Teach a model of 0.2 million parameters additions by GRPO: verl's trainer, Ray, a switching engine of two ranks.

    Writes OUT/steps.json, one object a step. Exit code 1 if the trainer fails or a step is missing.
    """
    if not tiny:
        fail("only --tiny runs here; moebius-rollout recipe NAME --run trains the other models")
    if steps < 1:
        fail(f"steps must be at least 1, got {steps}")
    check_policy(policy, POLICIES)
    rows = run(steps, policy, out, timeout_s)
    (out / "steps.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if len(rows) != steps:
        fail(f"{len(rows)} of {steps} steps ended; the end of {out}/log.txt says why", code=1)
    typer.echo(f"wrote {out}/steps.json")


def run(steps: int, policy: str, out: Path, timeout_s: float) -> list[dict[str, Any]]:
    """Trains for so many steps, and prints each as it ends. Returns those that ended, with COLUMNS.

    The trainer is ended after timeout_s.
    """
    from recipes.prepare import prepare
    from recipes.recipe import load_model, overrides
    from rollout.training import command

    out.mkdir(parents=True, exist_ok=True)
    prepare(RECIPE, out / "data", sample=True)
    changes = [
        f"trainer.total_training_steps={steps}",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={out.absolute()}/checkpoints",
        f"+actor_rollout_ref.rollout.engine_kwargs.moebius.policy={policy}",
    ]
    arguments = overrides(RECIPE, out / "data", changes=changes)
    lines = out / "verl.jsonl"
    lines.unlink(missing_ok=True)
    rows: list[dict[str, Any]] = []
    typer.echo("  ".join(["step", *COLUMNS]))
    with (out / "log.txt").open("w") as log:
        trainer = subprocess.Popen(
            command(load_model(RECIPE)[1].trainer, arguments),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"VERL_FILE_LOGGER_PATH": str(lines.absolute())},
        )
        try:
            for row in _steps(trainer, lines, time.monotonic() + timeout_s):
                rows.append(row)
                typer.echo("  ".join(f"{row[name]:.3g}".rjust(len(name)) for name in ("step", *COLUMNS)))
        finally:
            if trainer.poll() is None:
                trainer.terminate()
                trainer.wait(60)
    return rows


def _steps(trainer: subprocess.Popen, lines: Path, deadline: float) -> Iterator[dict[str, Any]]:
    """Steps as verl's file logger writes them, until the trainer has ended or the deadline has passed."""
    seen, running = 0, True
    while running and time.monotonic() < deadline:
        running = trainer.poll() is None
        complete = lines.read_text(encoding="utf-8").split("\n")[:-1] if lines.exists() else []
        for line in complete[seen:]:
            found = json.loads(line)
            if COLUMNS["step_s"] in found["data"]:  # else a line of validation
                data = {COLUMNS["inflight_at_switch"]: 0.0, **found["data"]}  # left out without a switch
                yield {"step": found["step"], **{name: data[key] for name, key in COLUMNS.items()}}
        seen = len(complete)
        time.sleep(0.5 if running else 0)
