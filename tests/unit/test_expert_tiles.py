"""EP's expert kernels take the tiles that were tuned for the whole model's experts."""

import pytest
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from moebius_engine.sglang import expert_tiles

TUNED = 128, 768  # Qwen3-30B-A3B on one H200: SGLang has a file


@pytest.fixture
def upstream(monkeypatch):
    """SGLang's own function on an H200, without what it remembers."""
    args = ServerArgs.__new__(ServerArgs)
    args.enable_deterministic_inference = False
    set_global_server_args_for_scheduler(args)
    monkeypatch.setattr(fused_moe_triton_config, "get_device_name", lambda: "NVIDIA H200")
    return fused_moe_triton_config.get_moe_configs.__wrapped__


@pytest.mark.parametrize(
    ("experts", "size", "ranks", "as_of"),
    [
        (64, 768, 2, TUNED),
        (32, 768, 4, TUNED),
        (128, 384, 1, (128, 384)),  # TP's shard has a file of its own
        (64, 768, 1, None),  # a model of 64 experts: none, and no EP
        (16, 1536, 8, TUNED),  # Qwen3-235B-A22B: for all 128 there are none, but for their halves
        (16, 3072, 8, TUNED),  # for their quarters
        (16, 6144, 8, None),
    ],
)
def test_tiles(monkeypatch, upstream, experts, size, ranks, as_of):
    monkeypatch.setattr(expert_tiles, "get_moe_expert_parallel_world_size", lambda: ranks)
    expected = upstream(*as_of, None) if as_of else None
    assert (expected is None) == (as_of is None)
    assert expert_tiles.get_moe_configs(upstream, experts, size, None, 0, 0) == expected


def test_tiles_of_the_share_itself_win(monkeypatch):
    monkeypatch.setattr(expert_tiles, "get_moe_expert_parallel_world_size", lambda: 2)
    files = {64: {1: {"BLOCK_SIZE_M": 16}}, 128: {1: {"BLOCK_SIZE_M": 64}}}
    assert expert_tiles.get_moe_configs(lambda E, *rest: files[E], 64, 768, None) == files[64]


def test_the_second_projection_gets_no_tiles_but_its_own(monkeypatch):
    """SGLang asserts that both projections' tiles agree in BLOCK_SIZE_M, and these are of different files."""
    monkeypatch.setattr(expert_tiles, "get_moe_expert_parallel_world_size", lambda: 2)
    files = {(64, False): {1: {"BLOCK_SIZE_M": 16}}, (128, True): {1: {"BLOCK_SIZE_M": 64}}}

    def original(E, N, dtype, block_n, block_k, per_channel_quant, down_moe):
        return files.get((E, down_moe))

    assert expert_tiles.get_moe_configs(original, 64, 768, None, down_moe=False) == files[64, False]
    assert expert_tiles.get_moe_configs(original, 64, 768, None, down_moe=True) is None
