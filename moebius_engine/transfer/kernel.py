"""The copy kernel (copy.cu): compiled when first needed, and launched."""

import ctypes
import logging
import math
import os
from pathlib import Path

from cuda.bindings import driver, nvrtc

from moebius_engine.memory.driver import attribute, call

THREADS, UNROLL = 512, 4
TILE_UNITS = THREADS * UNROLL
RESIDENT = 2  # blocks that fit on a multiprocessor: the compiler keeps to the registers that this leaves
WORDS = (16, 8, 4, 2, 1)  # bytes
MOST_TENSORS = 4

log = logging.getLogger(__name__)

_FOUR = ctypes.c_uint32 * MOST_TENSORS


class Task(ctypes.Structure):
    """As `struct Task` in copy.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("strips", "tiles", "bases", "peer_flags", "flags", "arrived", "missed")),
        ("begun", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("phases", "tensors", "distance", "ranks")),
        ("first_tile", _FOUR),
        ("tiles_of", _FOUR),
    )


class CopyKernel:
    """device: CUDA device index, its context current. sharing: ranks that run this kernel on this GPU at once.

    Raises RuntimeError with the compiler's log if the source does not compile, DriverError for a driver's refusal.
    """

    def __init__(self, device: int, sharing: int):
        major, minor = (attribute(device, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        library = call("load the copy kernel", driver.cuModuleLoadData(compile_source(f"sm_{major}{minor}")))
        self._functions = {
            word: call(f"find move_{word}", driver.cuModuleGetFunction(library, f"move_{word}".encode()))
            for word in WORDS
        }
        self._enter = call("find enter", driver.cuModuleGetFunction(library, b"enter"))
        multiprocessors = attribute(device, "MULTIPROCESSOR_COUNT")
        self._dense, self._listed = _blocks(multiprocessors, sharing)
        log.info(
            "copy kernel: %d blocks, %d for listed rows; %d multiprocessors, %d ranks share the GPU",
            *(self._dense, self._listed, multiprocessors, sharing),
        )

    def launch(self, word: int, listed: bool, task: Task, stream: int) -> None:
        """Enqueue on `stream` (a cudaStream_t): wait for all ranks, then copy. word: bytes of one access. listed:
        whether rows are listed, which needs more accesses in flight."""
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(task))
        for function, blocks in ((self._enter, 1), (self._functions[word], self._listed if listed else self._dense)):
            grid, block, shared_bytes, extra = (blocks, 1, 1), (THREADS, 1, 1), 0, 0
            launched = driver.cuLaunchKernel(
                function, *grid, *block, shared_bytes, stream, ctypes.addressof(parameters), extra
            )
            call("launch the copy kernel", launched)


def _blocks(multiprocessors: int, sharing: int) -> tuple[int, int]:
    """Blocks of a launch: for chunks at one pitch, and for listed rows.

    All ranks' blocks must be resident at once, since they wait for each other (copy.cu). A rank alone on its GPU fills
    it. Ranks that share one leave room: a full GPU was seen to keep blocks out for ever. Few accesses in flight, of
    long runs, are also what the memory likes best.
    """
    if sharing == 1:
        return multiprocessors * RESIDENT, multiprocessors * RESIDENT
    # MPS may have divided the multiprocessors already; this process then sees its own part only.
    percentage = float(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") or 100)
    rivals = max(1, math.ceil(sharing * percentage / 100))
    return max(1, multiprocessors // rivals), max(1, multiprocessors * 3 // 2 // rivals)


def compile_source(architecture: str) -> bytes:
    """copy.cu as machine code for `architecture`, such as "sm_90"; needs no device."""
    source = Path(__file__).with_name("copy.cu").read_bytes()
    constants = (f"THREADS={THREADS}", f"UNROLL={UNROLL}", f"RESIDENT={RESIDENT}")
    flags = [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        *(f"-D{constant}" for constant in constants),
    ]
    program = _nvrtc(nvrtc.nvrtcCreateProgram(source, b"copy.cu", 0, [], []))
    (code,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _nvrtc(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"copy.cu does not compile for {architecture}:\n{log.decode()}")
    binary = b" " * _nvrtc(nvrtc.nvrtcGetCUBINSize(program))
    _nvrtc(nvrtc.nvrtcGetCUBIN(program, binary))
    _nvrtc(nvrtc.nvrtcDestroyProgram(program))
    return binary


def _nvrtc(result: tuple):
    code, *values = result
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(code)[1].decode()}")
    return values[0] if values else None
