"""Process environment for SGLang on a CPU. Must be set before anything of SGLang is imported."""

import importlib.util
import os
import sys
from pathlib import Path

STAND_IN = Path(__file__).with_name("stand_in")


def is_needed() -> bool:
    """Whether this machine has no CUDA device, so that SGLang must run on its CPU platform."""
    import torch

    return not torch.cuda.is_available()


def choose() -> None:
    """Take the CPU also where there is a GPU. Call it before anything asks torch for one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def prepare(ranks: int | None = None) -> None:
    """Set what SGLang reads at import and at start on a machine without CUDA.

    The stand-in for `sgl_kernel` goes to the head of sys.path, which child processes inherit: the real package is
    absent, or fails to load without libcuda. Variables that the user has set stay, except the rank binding, which
    must have one entry a rank.

    ranks: scheduler processes of the engine that is about to start; None if none is. A rank imports what its parent's
    script imports, and must not undo what the parent has set for it.
    """
    if str(STAND_IN) not in sys.path:
        sys.path.insert(0, str(STAND_IN))
        importlib.invalidate_caches()
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # A path that does not exist keeps SGLang from probing NCCL.
    os.environ.setdefault("SGLANG_NCCL_SO_PATH", str(STAND_IN / "no-nccl"))
    # Compiling SGLang's small functions with g++ costs 44 s at the first request and gains nothing here.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if ranks is None:
        return
    cores = sorted(os.sched_getaffinity(0))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    # Ranks share the cores; torch's default of one thread a core would have them fight.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(cores) // ranks)))


ENGINE_ARGUMENTS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "max_total_tokens": 16384,
}
"""Server arguments that a CPU engine needs; the user's own win. max_total_tokens: KV tokens a rank."""
