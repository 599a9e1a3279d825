"""Writes a recipe's train.parquet and val.parquet."""

from importlib import import_module
from pathlib import Path

from datasets import disable_progress_bars

from recipes.recipe import load

SEED = 0  # of what is held out


def prepare(name: str, folder: Path, sample: bool = False) -> dict[str, int]:
    """Writes the splits of recipe `name` into `folder` and returns their numbers of rows.

    sample: the small data that ships with the recipe, without network. Raises ValueError for an unknown recipe, a data
    set that cannot be loaded, and one that has another number of rows than the recipe says.
    """
    disable_progress_bars()
    recipe = load(name)
    source = None if sample else recipe.source
    try:
        rows = import_module(f"recipes.{name}.data").rows(source)
    except OSError as error:  # of the network or of the Hub
        if source is None:
            raise
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{source.path} at {source.revision} cannot be loaded: {reason}; without a network, --sample prepares the "
            "problems that ship with the recipe"
        ) from error
    if source and len(rows) != source.rows:
        raise ValueError(
            f"{source.path} at {source.revision} has {len(rows)} rows, and recipes/{name}/recipe.yaml says "
            f"{source.rows}: check path and revision, and correct the number only if they are right"
        )
    splits = rows.train_test_split(test_size=recipe.holdout, seed=SEED)
    folder.mkdir(parents=True, exist_ok=True)
    for split, part in (("train", splits["train"]), ("val", splits["test"])):
        part.to_parquet(folder / f"{split}.parquet")
    return {"train": len(splits["train"]), "val": len(splits["test"])}
