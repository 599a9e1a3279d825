"""How long work takes on a GPU."""

import statistics
from collections.abc import Callable

import torch

_WARM_UP = 3


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Milliseconds that `work`, which enqueues on the current stream, takes there, after a few that do not count."""
    times = []
    for _ in range(_WARM_UP + repeats):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return statistics.median(times[_WARM_UP:])
