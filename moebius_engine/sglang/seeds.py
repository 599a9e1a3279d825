"""Each request draws by a seed of its own, in any layout and batch: the same seed, the same tokens."""

import zlib

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.plugins.hook_registry import HookType

from moebius_engine.sglang.hooks import Hook


def seed_of(req: Req) -> int:
    """Its sampling_seed, or a hash of its id: upstream gives all requests without a seed the same one."""
    seed = req.sampling_params.sampling_seed
    return zlib.crc32(req.rid.encode()) if seed is None else seed


def from_schedule_batch(original, cls, batch, vocab_size):
    made = original(cls, batch, vocab_size)
    made.sampling_seed = torch.tensor([seed_of(req) for req in batch.reqs], dtype=torch.int64, device=batch.device)
    return made


def multinomial_with_seed(original, logprobs, seed, positions):
    return original(logprobs, seed, positions[: len(seed)])


SEED_HOOKS = (
    Hook(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        HookType.AROUND,
        from_schedule_batch,
        ("batch", "vocab_size"),
        "upstream heeds a request's seed only together with batch-invariant kernels, which are slow",
    ),
    Hook(
        "sglang.srt.layers.sampler.multinomial_with_seed",
        HookType.AROUND,
        multinomial_with_seed,
        ("logprobs", "seed", "positions"),
        "data-parallel attention pads the positions to the largest rank's batch",
    ),
)
