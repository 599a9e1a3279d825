"""Random numbers across a switch."""

import random

import numpy as np
import torch

from moebius_engine.layout import Layout

_STRIDE = 1_000_003  # between the seeds of one switch and the next: more than there are ranks


def draw_anew(seed: int, switches: int, layout: Layout, rank: int) -> None:
    """Seed this rank's generators after its `switches`-th switch, which was into `layout`. seed: the engine's.

    TP's ranks must draw the same numbers; EP's must not, or their samples would repeat each other's.

    Seeds what SGLang's set_random_seed does and draws from; torch.manual_seed would also ask absent back ends, which
    costs milliseconds.
    """
    own = seed + switches * _STRIDE + (rank if layout == Layout.EP else 0)
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.default_generator.manual_seed(own)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(own)
