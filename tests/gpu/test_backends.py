"""The attention and sampling that verl and SGLang choose on a Hopper GPU: `verify` with each of them, in bfloat16."""

from importlib.util import find_spec

import pytest
import torch

from recipes.tiny_moe import make_tiny_moe
from rollout.verify import run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]  # FlashInfer compiles its kernels when they are first used

SHARE_GPU = torch.cuda.device_count() == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """With heads of 128, as published models have: FlashAttention 3 has no kernels for those of the tiny model."""
    sizes = {"hidden": 128, "experts": 16, "intermediate": 64, "q_heads": 8, "kv_heads": 2, "head_dim": 128}
    return str(make_tiny_moe(tmp_path_factory.mktemp("models") / "wide_heads", **sizes))


@pytest.mark.parametrize("backend", ["flashinfer", "fa3"])
def test_what_others_choose_by_default(model, backend):
    if backend == "fa3" and find_spec("sgl_kernel.flash_ops") is None:
        pytest.skip("SGLang's FlashAttention 3 kernels are not installed")
    back_ends = {"attention_backend": backend, "sampling_backend": "flashinfer"}
    result = run(switches=10, ranks=2, dtype="bfloat16", share_gpu=SHARE_GPU, model=model, server_args=back_ends)
    assert result["ok"] and result["inflight_min"] > 0
