"""`moebius-rollout soak`: a rollout with switches, aborts, updates and faults, for as long as one likes."""

import json
import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from rollout.failure import fail


def soak_command(
    minutes: Annotated[float, typer.Option(help="How long.")] = 5.0,
    faults: Annotated[bool, typer.Option("--faults", help="Break switches, kill and stop ranks.")] = False,
    ranks: Annotated[int, typer.Option(help="Processes that hold the model.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the requests and of what happens.")] = 0,
    log: Annotated[Path | None, typer.Option(help="A file for what happens, line by line.")] = None,
) -> None:
    """Keep requests in flight on the CPU while all sorts of things happen, and compare every token with an undisturbed
    run.

    Ends with one line of JSON. Exit code 1 if a request was lost or a token differs.
    """
    if not minutes > 0:
        fail(f"minutes must be above 0, got {minutes}")
    if ranks < 2:
        fail(f"ranks must be at least 2, got {ranks}; with one there is nothing to switch")
    from moebius_engine.sglang.arguments import check_machine
    from moebius_engine.sglang.cpu import environment

    environment.choose()
    from rollout.soak.start import soak  # imports SGLang, which takes seconds

    try:
        check_machine(ranks)
    except ValueError as error:
        fail(str(error))
    if log is not None:
        handler = logging.FileHandler(log)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
        for package in ("rollout", "moebius_engine"):  # SGLang sets the root logger's level at each start
            logging.getLogger(package).addHandler(handler)
            logging.getLogger(package).setLevel(logging.INFO)
    with TemporaryDirectory() as folder:
        counts = soak(folder, minutes, faults, ranks, seed)
    typer.echo(json.dumps(counts.as_json()))
    raise typer.Exit(0 if counts.ok else 1)
