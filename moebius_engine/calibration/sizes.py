"""Which numbers of requests a calibration measures with, and what they cost."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from moebius_engine.calibration.curve import Point, crossing, likely

STEPS = 24  # decode steps timed for each layout and number of requests
TOKENS = 10 * STEPS  # of a response, which is ended before it has them
ROUNDS = 4  # of finer numbers: up to two until none lie further apart than a factor of two, two to within 1.25
_CLOSE = 1.25  # numbers of requests are close together if one is no more than so many times the other
_FULL = 0.9  # share of a rank's KV rows that is used at most


def sizes_that_fit(ranks: int, running: int, ep_tokens: int, tp_tokens: int, context: int) -> list[int]:
    """P, 4P, 16P, ... as far as both layouts decode so many requests of this length together, and twice the last one if
    that many fit.

    running: requests of one rank in EP. One less: the last one that a rank may run waits until another ends if its
    prompt begins in a chunk that others fill (SGLang's get_new_batch_prefill). ep_tokens, tp_tokens: KV tokens of one
    rank, which in TP holds all requests: less than P times EP's if there are fewer KV heads than ranks.
    Raises ValueError if fewer than two numbers fit.
    """
    tokens = min(ep_tokens, tp_tokens // ranks)
    most = min(running - 1, int(tokens * _FULL) // (context + TOKENS))
    sizes = [ranks]
    while sizes[-1] * 4 <= most * ranks:
        sizes.append(sizes[-1] * 4)
    if sizes[-1] * 2 <= most * ranks:
        sizes.append(sizes[-1] * 2)
    if len(sizes) < 2:
        raise ValueError(
            f"context={context}: a rank holds {tokens} KV tokens and may run {running} requests, too few for 2 "
            "and one to spare; give a smaller context or a larger max_running_requests"
        )
    return sizes


def longer_batch(most: int, ranks: int, context: int, limit: int) -> tuple[int, int] | None:
    """Requests, and tokens of each, of a batch that holds no more tokens than `most` requests of `context` tokens, but
    in fewer requests: an eighth of them if it can be, else a fourth or a half. None if a rank would have no request, or
    one more than `limit` tokens."""
    for part in (8, 4, 2):
        requests, tokens = most // part // ranks * ranks, part * context
        if requests and tokens + TOKENS <= limit:
            return requests, tokens
    return None


def finer(points: Sequence[Point], ranks: int) -> list[int]:
    """Numbers of requests, multiples of P, to be measured next; none once those between which the layouts cross are
    close together.

    One between any two between which the layouts may cross (curve.likely), those first that lie further apart than a
    factor of two, or three if there are but two such numbers. Not only around the crossing: single numbers are a few
    percent off, so where both layouts are about as fast all of them together tell, and none of them alone.
    """
    least, most = likely(points)
    measured = sorted({p.requests for p in points})
    gaps = [(low, high) for low, high in itertools.pairwise(measured) if low < most and high > max(least, _CLOSE * low)]
    between = [2.0 * low for low, high in gaps if high > 2 * low]
    if not between:
        parts = 4 if len(gaps) == 1 else 2
        between = [low + part * (high - low) / parts for low, high in gaps for part in range(1, parts)]
    return sorted({round(size / ranks) * ranks for size in between} - set(measured))


def time_for(spent: Sequence[float], growth: float) -> float:
    """Seconds that `growth` times as many requests as at last will take in EP, and TP at all numbers then.

    spent: of each number so far. What any number takes is the least of them. Beyond that it goes with the requests,
    since prompts are prefilled once; in TP they are cached.
    """
    fixed = min(spent)
    return fixed + (spent[-1] - fixed) * growth + fixed * (len(spent) + 1)


def kernel_sizes(most: int) -> list[int]:
    """Tokens of prefills, up to `most`, that between them use every kernel of a fused MoE layer.

    SGLang's tables of tile sizes go by the nearest of 1, 2, 4, 8, 16, 24, 32, 48, 64, ... 1536, 2048, 3072, 4096 tokens
    (moe_runner/triton_utils), and Triton compiles each anew for odd numbers, since a token's experts times those are no
    multiple of 16.
    """
    doubled = [part << power for power in range(most.bit_length()) for part in (1, 3)]
    return sorted({size for even in doubled for size in (even, even + 1) if size <= most})


class Cost(NamedTuple):
    """What a sweep takes, in seconds. fixed: a number of requests in one layout. each: a request of the largest number,
    since prompts are prefilled once."""

    fixed: float
    each: float

    @classmethod
    def of(cls, spent: Sequence[float], seconds: float, most: int) -> "Cost":
        """From a sweep that took `seconds` in all, and `spent` for each number up to `most` in EP."""
        fixed = min(spent)
        return cls(fixed, max(0.0, seconds - 2 * fixed * len(spent)) / most)

    def seconds(self, sizes: Sequence[int]) -> float:
        """One number more, for the switches."""
        return 2 * self.fixed * (len(sizes) + 1) + self.each * max(sizes)

    def affordable(self, sizes: Sequence[int], points: Sequence[Point], seconds: float) -> list[int]:
        """Those of the sizes that so many seconds are enough for, the ones next to where the layouts now seem to cross
        before others. points: measured so far."""
        found = crossing(points)
        at = found.requests or (max if found.winner == "tp" else min)(p.requests for p in points)
        taken: list[int] = []
        for size in sorted(sizes, key=lambda size: abs(math.log(size / at))):
            if self.seconds([*taken, size]) <= seconds:
                taken.append(size)
        return sorted(taken)
