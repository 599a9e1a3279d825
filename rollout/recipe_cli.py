"""`moebius-rollout recipe`: shows, prepares and runs the recipes in recipes/."""

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from rollout.failure import fail


def recipe_command(
    name: Annotated[str, typer.Argument(help="Name of a folder in recipes/, such as deepmath_grpo.")],
    show: Annotated[bool, typer.Option("--print", help="Print the overrides of verl's configuration.")] = False,
    prepare: Annotated[bool, typer.Option("--prepare", help="Write train.parquet and val.parquet.")] = False,
    run: Annotated[bool, typer.Option("--run", help="Start verl's trainer.")] = False,
    model: Annotated[str | None, typer.Option(help="One of the recipe's models; the first if left out.")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="key=value of verl's configuration.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the two files; data/NAME if left out.")] = None,
    sample: Annotated[bool, typer.Option(help="Prepare the small data that needs no network.")] = False,
) -> None:
    """Print a recipe, prepare its data, or train with it; in this order where several are asked for.

    Exit code 2 for an unknown recipe, model or key; that of verl's trainer with --run.
    """
    if not (show or prepare or run):
        fail("nothing to do: give --print, --prepare or --run")
    if sample and not prepare:
        fail("--sample says what to prepare: give --prepare too")
    from recipes.prepare import prepare as write
    from recipes.recipe import load_model, overrides
    from rollout.training import command, compose

    folder = data or Path("data") / name
    if folder.exists() and not folder.is_dir():
        fail(f"data must be a folder, and {folder} is a file; name another")
    try:
        arguments = overrides(name, folder, model, changes or [])
        trainer = load_model(name, model)[1].trainer
        compose(trainer, arguments)
        if show:
            typer.echo("\n".join(arguments))
        if prepare:
            counts = write(name, folder, sample)
            typer.echo(f"wrote {folder}: {counts['train']} rows to train on, {counts['val']} to validate")
    except (ValueError, ModuleNotFoundError) as error:
        fail(str(error))
    if not run:
        return
    if not (folder / "train.parquet").exists():
        fail(f"{folder}/train.parquet is not there: run this recipe with --prepare first")
    raise typer.Exit(subprocess.run(command(trainer, arguments)).returncode)
