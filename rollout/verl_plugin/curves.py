"""Requests in flight over a rollout step, as a line plot in wandb."""

import sys
from collections.abc import Sequence

from rollout.metrics import PREFIX
from rollout.verl_plugin.metrics import Results

NAME = PREFIX + "inflight"


def log_curves(results: Sequence[Results], step: int) -> None:
    """Adds the plot to what verl will log for `step`: one line for each replica and rollout step that has ended.

    Nothing where this process, the trainer's, logs to no wandb run.
    """
    wandb = sys.modules.get("wandb")  # verl's logger has imported it, if it is used
    if wandb is None or wandb.run is None:
        return
    lines = {
        f"replica {replica}, step {report.step}": report.inflight
        for replica, (reports, _) in enumerate(results)
        for report in reports
        if report.inflight
    }
    if lines:
        plot = wandb.plot.line_series(
            xs=[[seconds for seconds, _ in line] for line in lines.values()],
            ys=[[count for _, count in line] for line in lines.values()],
            keys=list(lines),
            title="requests in flight",
            xname="seconds since the step began",
        )
        wandb.run.log({NAME: plot}, step=step, commit=False)
