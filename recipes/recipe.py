"""A recipe: overrides of verl's configuration as data, in recipes/NAME/recipe.yaml and recipes/models/MODEL.yaml.

Keys are written as on verl's command line: the key's path, with "+" before one that verl's configuration lacks.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

FOLDER = Path(__file__).parent


class Source(BaseModel):
    """A Hugging Face data set at one revision (a commit), with the rows that the recipe must find in it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    path: str
    revision: str
    rows: int


class Model(BaseModel):
    """What a model and its hardware need. trainer: which command runs verl (rollout/training.py)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    trainer: Literal["gpu", "cpu"] = "gpu"
    overrides: dict[str, Any]


class Recipe(BaseModel):
    """source: None where the problems are generated. holdout: share of the rows for validation.

    checkpoint: folder in the recipe's own that holds the model, for one that is not downloaded.
    models: name of a file in recipes/models → overrides for this recipe with that model. The first is the default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    description: str
    source: Source | None = None
    holdout: float
    checkpoint: str | None = None
    overrides: dict[str, Any]
    models: dict[str, dict[str, Any]]


def names() -> list[str]:
    return sorted(path.parent.name for path in FOLDER.glob("*/recipe.yaml"))


def load(name: str) -> Recipe:
    """Raises ValueError for a name that is not in `names()`, and for a file with an unknown or missing field."""
    if name not in names():
        raise ValueError(f"there is no recipe {name!r}; there are {', '.join(names())}")
    return Recipe.model_validate(yaml.safe_load((FOLDER / name / "recipe.yaml").read_text()))


def load_model(name: str, model: str | None = None) -> tuple[str, Model]:
    """A model of recipe `name`, by default its first, with its own name. Raises ValueError for an unknown one."""
    models = load(name).models
    model = model or next(iter(models))
    if model not in models:
        raise ValueError(f"recipe {name} has no model {model!r}; it has {', '.join(models)}")
    return model, Model.model_validate(yaml.safe_load((FOLDER / "models" / f"{model}.yaml").read_text()))


def overrides(name: str, data: Path, model: str | None = None, changes: Iterable[str] = ()) -> list[str]:
    """Arguments for verl's command line, one a key: those of the model, of the recipe, of both, `data`, `changes`.

    data: folder of train.parquet and val.parquet. changes: "key=value" in hydra's syntax; for a key that is set already
    its "+" may be left out. Raises ValueError for an unknown recipe or model and a change that is not key=value.
    """
    recipe = load(name)
    model, hardware = load_model(name, model)
    paths = {f"data.{split}_files": data.absolute() / f"{split}.parquet" for split in ("train", "val")}
    if recipe.checkpoint:
        paths["actor_rollout_ref.model.path"] = FOLDER / name / recipe.checkpoint
    named = {"trainer.experiment_name": f"{name}_{model}"} | {key: str(path) for key, path in paths.items()}
    layers = [hardware.overrides, recipe.overrides, recipe.models[model], named]
    # Bare key → prefix and text of its value. A later layer replaces an earlier one.
    found = {key.lstrip("+"): (_prefix(key), _literal(value)) for layer in layers for key, value in layer.items()}
    for change in changes:
        key, equals, text = change.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ValueError(f"a change is key=value, got {change!r}")
        bare = key.lstrip("+")
        found[bare] = (found[bare][0] if bare in found else _prefix(key), text)
    return [f"{prefix}{key}={text}" for key, (prefix, text) in found.items()]


def _prefix(key: str) -> str:
    return key[: len(key) - len(key.lstrip("+"))]


def _literal(value: Any) -> str:
    """A value of the YAML file in hydra's syntax for the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    if isinstance(value, list):
        return "[" + ",".join(_literal(item) for item in value) + "]"
    raise TypeError(f"an override is a scalar or a list of them, got {value!r}")
