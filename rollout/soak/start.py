"""Starts what a soak needs: a small model and an actor."""

import asyncio

from rich.progress import Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import load_file

from recipes.tiny_moe import make_tiny_moe
from rollout.actor import RolloutActor
from rollout.soak.counts import Counts
from rollout.soak.mix import Mix
from rollout.soak.run import RECOVERY, SERVER, SWITCH, Soak
from rollout.verify import model_shape

LAYERS = 4


def soak(folder: str, minutes: float, faults: bool, ranks: int, seed: int) -> Counts:
    """Make a model in `folder` and run."""
    model = make_tiny_moe(folder, layers=LAYERS, **model_shape(ranks))
    actor = RolloutActor(str(model), ranks=ranks, switch=SWITCH, server_args=SERVER, recovery=RECOVERY)
    columns = TextColumn("{task.fields[counts]}", markup=False)
    with Progress(TimeElapsedColumn(), columns, transient=True) as progress:
        line = progress.add_task("soak", counts="the undisturbed run")

        def tell(counts: Counts) -> None:
            progress.update(
                line,
                counts=f"{counts.finished} finished, {counts.switches} switches, {counts.undone} undone, "
                f"{counts.restarts} restarts, {counts.lost} lost",
            )

        mix = Mix(seed, ranks, LAYERS, faults)
        try:
            run = Soak(actor, load_file(model / "model.safetensors"), mix, seed, tell).run(minutes)
            return asyncio.run(run)
        finally:
            actor.shutdown()
