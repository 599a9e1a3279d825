"""`moebius-rollout report`: compares static TP, static EP and switching runs on one page."""

from pathlib import Path
from typing import Annotated

import typer

from rollout.failure import fail


def report_command(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="PATH or NAME=PATH: a steps.jsonl, a wandb run (offline-run-*), a folder of either, or the demo's.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page: step times, speed-ups, requests in flight and switch costs of these runs.

    Exit code 2 for a path that is no run, an empty run, two runs of one name, or a line that does not fit.
    """
    from rollout.report.compare import gaps
    from rollout.report.page import headlines, render
    from rollout.report.sources import read_runs

    try:
        if out.is_dir():
            raise ValueError(f"out={out} is a folder; name a file")
        found = read_runs(runs)
    except ValueError as error:
        fail(str(error))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(found), encoding="utf-8")
    for line in (*headlines(found), *gaps(found), f"Written: {out}"):
        typer.echo(line)
