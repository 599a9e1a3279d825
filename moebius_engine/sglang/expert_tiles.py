"""Tile sizes of EP's expert kernels: those tuned for all of the model's experts, where a rank's share has none.

SGLang picks the tiles of its fused MoE kernel from files by (experts of a rank, their intermediate size, GPU) and by
the number of tokens. It has files for whole models and for TP's shards, and hardly any for EP's shares; without one it
takes a default. In EP each of a rank's E/P experts gets the tokens that it would get with all E on one rank, in
matrices of the same size. Only the number of matrices differs, so the tiles tuned for E fit E/P.
"""

import functools
import logging
from typing import Any

from sglang.srt.distributed.parallel_state import get_moe_expert_parallel_world_size
from sglang.srt.plugins.hook_registry import HookType

from moebius_engine.sglang.hooks import Hook

log = logging.getLogger(__name__)

Tiles = dict[int, dict[str, Any]]
"""Number of tokens → arguments of the kernel."""


def get_moe_configs(original, E, N, dtype, *args, **kwargs) -> Tiles | None:
    found = original(E, N, dtype, *args, **kwargs)
    ranks = get_moe_expert_parallel_world_size()
    if found is None and ranks > 1:
        found = original(E * ranks, N, dtype, *args, **kwargs)
        _say(E, N, ranks, found is not None)
    return found


@functools.cache
def _say(experts: int, size: int, ranks: int, found: bool) -> None:
    taken = f"those of E={experts * ranks}, tuned for all experts" if found else "SGLang's default"
    log.info("no tile sizes are tuned for EP's E=%d,N=%d here: it takes %s", experts, size, taken)


TILE_HOOKS = (
    Hook(
        "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config.get_moe_configs",
        HookType.AROUND,
        get_moe_configs,
        ("E", "N", "dtype"),
        "tiles are tuned for a whole model's experts, and for an EP rank's share of them there is only a default",
    ),
)
