"""What a GPU can: copy within its memory, and write into its peer's by a kernel of plain stores and by the copy engine.

For the peer's, one process drives the first two GPUs, both of which write at once, as they do in a switch.
"""

import statistics

import torch
import triton
import triton.language as tl
from gpu_time import median_ms

COPY_BYTES = 4 << 30  # of a copy within a GPU
NBYTES, ROUNDS = 2 << 30, 4  # of one timed copy to a peer, and copies in a row
_BLOCK, _WARPS = 8192, 16  # words of 4 bytes a program: 16 bytes a thread and access, four of them in flight


@triton.jit
def _copy(source, target, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at))


def copy_gbs(repeats: int) -> float:
    """GB/s of bytes read plus bytes written: median of `repeats`."""
    source = torch.empty(COPY_BYTES // 2, dtype=torch.int16, device="cuda").random_()
    target = torch.empty_like(source)
    return round(2 * COPY_BYTES / median_ms(lambda: target.copy_(source), repeats) / 1e6, 1)


def peer_gbs(repeats: int) -> dict[str, float]:
    """GB/s that cross the link each way: median of `repeats`, the slower GPU of each. Needs two GPUs."""
    sources = [torch.empty(NBYTES // 4, dtype=torch.int32, device=f"cuda:{gpu}").random_() for gpu in range(2)]
    arrived = [torch.empty_like(source) for source in reversed(sources)]  # of each GPU, on the other

    def by_kernel(gpu: int) -> None:
        _copy[(NBYTES // 4 // _BLOCK,)](sources[gpu], arrived[gpu], BLOCK=_BLOCK, num_warps=_WARPS)

    def by_copy_engine(gpu: int) -> None:
        arrived[gpu].copy_(sources[gpu], non_blocking=True)

    found = {}
    # The copy engine comes first: torch opens the peer's memory for this process at the first copy.
    for name, copy in (("copy_engine", by_copy_engine), ("sm", by_kernel)):
        rates = [_rate(copy) for _ in range(2 + repeats)][2:]
        if not all(torch.equal(sent.to(got.device), got) for sent, got in zip(sources, arrived, strict=True)):
            raise RuntimeError(f"{name}: other bytes arrived than were sent")
        for target in arrived:
            target.zero_()
        found[name] = round(statistics.median(rates), 1)
    return found


def _rate(copy) -> float:
    marks = []
    for gpu in range(2):
        torch.cuda.synchronize(gpu)
    for gpu in range(2):
        with torch.cuda.device(gpu):
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            for _ in range(ROUNDS):
                copy(gpu)
            ended.record()
            marks.append((began, ended))
    for _, ended in marks:
        ended.synchronize()
    return NBYTES * ROUNDS / max(began.elapsed_time(ended) for began, ended in marks) / 1e6
