"""How a command of `moebius-rollout` ends when it cannot go on: one line that begins with "Error:", also in a log."""

from collections.abc import Collection
from typing import NoReturn

import typer

BAD_ARGUMENT = 2  # exit code


def fail(message: str, code: int = BAD_ARGUMENT) -> NoReturn:
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(code)


def check_policy(policy: str, policies: Collection[str]) -> None:
    """policies: those that the command takes."""
    if policy not in policies:
        fail(f"policy={policy!r} is unknown: use one of {list(policies)}")
