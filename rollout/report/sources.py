"""Which runs the command line names: `PATH` or `NAME=PATH`, to a steps.jsonl, a wandb run, or a folder of either."""

from collections.abc import Sequence
from pathlib import Path

from rollout.report.json_lines import read_steps
from rollout.report.run import TITLES, Run, make_run
from rollout.report.wandb_run import read_run

MOST_SWITCHING = 4  # as many colours as the page has for them


def read_runs(arguments: Sequence[str]) -> list[Run]:
    """All runs: static TP, static EP, then the others as given. A folder of runs, as the demo writes, gives one run for
    each of its folders.

    Raises ValueError for a path that is no run, an empty run, two runs of one name, two runs of one static layout, and
    more than MOST_SWITCHING others.
    """
    runs = [_read(name, path) for argument in arguments for name, path in _find(argument)]
    runs.sort(key=lambda run: list(TITLES).index(run.kind))
    if (count := sum(run.kind == "switching" for run in runs)) > MOST_SWITCHING:
        raise ValueError(
            f"{count} switching runs were given, and a page shows at most {MOST_SWITCHING}; leave some out"
        )
    for index, run in enumerate(runs):
        for other in runs[:index]:
            if run.name == other.name:
                raise ValueError(f"{other.path} and {run.path} are both named {run.name}; name them: NAME=PATH")
            if run.kind == other.kind != "switching":
                raise ValueError(
                    f"{other.path} and {run.path} are both {TITLES[run.kind]}: a comparison has one of each static "
                    "layout; leave one out"
                )
    return runs


def _find(argument: str) -> list[tuple[str | None, Path]]:
    """(name, file) of each run that an argument means."""
    name, path = None, Path(argument)
    if not path.exists() and "=" in argument:
        name, _, rest = argument.partition("=")
        path = Path(rest)
        if not name or not rest:
            raise ValueError(f"{argument!r} should be PATH or NAME=PATH")
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    file = _run_file(path)
    if file is not None:
        return [(name, file)]
    inside = [folder for folder in sorted(path.iterdir()) if folder.is_dir()] if path.is_dir() else []
    files = [(folder.name, found) for folder in inside if (found := _run_file(folder)) and found.suffix == ".jsonl"]
    if not files:
        raise ValueError(f"{path} is no run: no steps.jsonl, no wandb run, and no folder of folders with steps.jsonl")
    if name is not None:
        raise ValueError(f"{path} has {len(files)} runs, so it cannot be named {name}; name one of them")
    return list(files)


def _run_file(path: Path) -> Path | None:
    if path.is_file():
        return path if path.suffix in (".jsonl", ".wandb") else None
    found = [*path.glob("steps.jsonl"), *path.glob("*.wandb")]
    if len(found) > 1:
        raise ValueError(f"{path} has {len(found)} runs: {', '.join(file.name for file in found)}; name one file")
    return found[0] if found else None


def _read(name: str | None, path: Path) -> Run:
    if path.suffix == ".jsonl":
        return make_run(name, None, path, read_steps(path))
    steps, policy, remarks = read_run(path)
    return make_run(name, policy, path, steps, remarks)
