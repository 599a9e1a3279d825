"""Tile sizes of EP's expert kernels: those tuned for all of the model's experts, where a rank's share has none.

SGLang picks the tiles of its fused MoE kernel from files by (experts of a rank, their intermediate size, GPU) and by
the number of tokens. It has files for whole models and for TP's shards, and hardly any for EP's shares; without one it
takes a default. In EP each of a rank's E/P experts gets the tokens that it would get with all E on one rank, in
matrices of the same size. Only the number of matrices differs, so the tiles tuned for E fit E/P. Where the whole model
has no file either, those of its experts cut in two or in four, which TP's ranks have, are faster than the default from
32 tokens on and slower below, where TP is the faster layout anyway (benchmarks/expert_tiles_h200.json).
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

_CUTS = (1, 2, 4)  # of an expert's intermediate size


def get_moe_configs(
    original, E, N, dtype, block_n=0, block_k=0, per_channel_quant=False, down_moe=False
) -> Tiles | None:
    rest = dtype, block_n, block_k, per_channel_quant, down_moe
    found, ranks = original(E, N, *rest), get_moe_expert_parallel_world_size()
    # The second projection's own tiles must have the first one's BLOCK_SIZE_M; without any it takes the first one's.
    if found is not None or ranks == 1 or down_moe:
        return found
    for cut in _CUTS:
        if tiles := original(E * ranks, N // cut, *rest):
            _say(E, N, f"those tuned for E={E * ranks},N={N // cut}")
            return tiles
    _say(E, N, "SGLang's default")
    return None


@functools.cache
def _say(experts: int, size: int, taken: str) -> None:
    log.info("no tile sizes are tuned for EP's E=%d,N=%d here: it takes %s", experts, size, taken)


TILE_HOOKS = (
    Hook(
        "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config.get_moe_configs",
        HookType.AROUND,
        get_moe_configs,
        ("E", "N", "dtype", "block_n", "block_k", "per_channel_quant", "down_moe"),
        "tiles are tuned for a whole model's experts, and for an EP rank's share of them there is only a default",
    ),
)
