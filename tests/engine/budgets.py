"""A memory budget against what an engine's ranks really take."""

from dataclasses import replace

from moebius_engine.memory.budget import Sizes, budget

TOLERANCE = 0.02


def disagreements(sizes: Sizes, measured: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Components whose budget and measured bytes differ by more than TOLERANCE, or that only one side has."""
    planned = {component.key: component.nbytes for component in budget(sizes).components}
    both = {key: (planned.get(key, -1), measured.get(key, -1)) for key in planned.keys() | measured.keys()}
    return {key: pair for key, pair in both.items() if abs(pair[0] - pair[1]) > TOLERANCE * max(pair)}


def cpu_sizes(engine, **settings) -> Sizes:
    """Of an engine on a CPU: what the settings leave open is the tiny model's and the CPU engine's."""
    defaults = {"tokens": 16384, "context": 4096, "positions": 4096, "itemsize": 4, "kv_itemsize": 4}
    fixed = {"shape": engine.shape, "ranks": engine.ranks, "device": "cpu", "transfer": "collective"}
    return Sizes(**defaults | fixed | settings)


def wrong(sizes: Sizes, **changes) -> Sizes:
    """The same with another model shape: a budget of it must disagree."""
    return replace(sizes, shape=replace(sizes.shape, **changes))
