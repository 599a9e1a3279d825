"""Which command runs verl's trainer on a recipe's arguments, and what configuration it makes of them."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

# Trainer → package whose __main__ takes hydra's arguments, its configuration's folder, and that one's name.
TRAINERS = {
    "gpu": ("verl.trainer.main_ppo", ("verl", "trainer", "config"), "ppo_trainer"),
    "cpu": ("rollout.verl_plugin.cpu.train", ("rollout", "verl_plugin", "cpu", "config"), "moebius_cpu"),
}
Trainer = Literal["gpu", "cpu"]


def command(trainer: Trainer, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", TRAINERS[trainer][0], *arguments]


def compose(trainer: Trainer, arguments: Sequence[str]) -> Any:
    """The configuration that the command makes of these arguments, without importing verl (seconds).

    Raises ValueError for a key that verl does not have and for a value that hydra cannot read; ModuleNotFoundError
    without verl.
    """
    _package("verl")
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    _, folder, name = TRAINERS[trainer]
    with initialize_config_dir(str(_package(folder[0]).joinpath(*folder[1:])), version_base=None):
        try:
            return compose(name, overrides=list(arguments))
        except (HydraException, OmegaConfBaseException) as error:
            reason = f" ({error.__cause__})" if error.__cause__ else ""
            raise ValueError(" ".join(f"{error}{reason}".split())) from error


def _package(name: str) -> Path:
    """The folder of a package, which is not imported."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"there is no package {name}; recipes need verl 0.9.1 (README, Install)")
    return Path(spec.submodule_search_locations[0])
