"""How many requests a calibration measures with, and for how long."""

import itertools
import json
import math
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sglang
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.calibration.curve import Point, crossing
from moebius_engine.calibration.measure import _time
from moebius_engine.calibration.sizes import ROUNDS, STEPS, TOKENS, Cost, finer, kernel_sizes, sizes_that_fit, time_for
from moebius_engine.layout import Layout
from tests.unit.test_calibration_curve import points


@given(st.integers(2, 16), st.integers(3, 4096), st.integers(3, 10**6), st.integers(1, 4096))
def test_a_rank_holds_its_share_with_one_request_to_spare(ranks, running, requests, context):
    tokens = 2 * requests * (context + TOKENS)
    sizes = sizes_that_fit(ranks, running, tokens, ranks * tokens, context)
    assert sizes[0] == ranks and len(sizes) >= 2
    assert all(later == 4 * earlier for earlier, later in itertools.pairwise(sizes[:-1]))
    assert sizes[-1] in (2 * sizes[-2], 4 * sizes[-2])
    share = sizes[-1] // ranks
    assert share < running
    assert share * (context + TOKENS) <= 0.9 * tokens
    # Twice as many do not fit, but for rounding.
    assert 2 * share >= running or 2 * share * (context + TOKENS) > 0.9 * tokens - context - TOKENS


def test_all_that_a_rank_may_run_are_too_many():
    """Seen on two H200s and on a CPU: with prompts that do not divide a chunk, the last one waited for the others."""
    sizes = partial(sizes_that_fit, ranks=2, ep_tokens=10**6, tp_tokens=2 * 10**6, context=256)
    assert sizes(running=256) == [2, 8, 32, 128, 256]
    assert sizes(running=257) == [2, 8, 32, 128, 512]


def test_too_small_ranks_are_refused():
    with pytest.raises(ValueError, match="context=16: a rank holds 1000 KV tokens and may run 2 requests, too few"):
        sizes_that_fit(ranks=2, running=2, ep_tokens=1000, tp_tokens=2000, context=16)


def test_a_tp_rank_holds_all_requests():
    """With one KV head it has room for no more tokens than one rank in EP."""
    sizes = sizes_that_fit(ranks=4, running=1000, ep_tokens=10**5, tp_tokens=10**5, context=760)
    assert sizes == [4, 16, 64] and sizes[-1] * 1000 <= 0.9 * 10**5 < 2 * sizes[-1] * 1000


def test_prefills_reach_every_tile_size_that_sglang_has_tuned():
    """Each by an odd number of tokens and by an even one."""
    folder = Path(sglang.__file__).parent / "srt/layers/moe/moe_runner/triton_utils"
    rule = "min(configs.keys(), key=lambda x: abs(x - M))"
    assert rule in (folder / "fused_moe_triton_config.py").read_text("utf-8")
    tables = [json.loads(path.read_text("utf-8")) for path in folder.glob("configs/*/E=128,*,device_name=NVIDIA_H*")]
    assert tables
    for table in tables:
        tuned = [int(tokens) for tokens in table if tokens.isdigit() and int(tokens) <= 4096]
        for odd in (0, 1):
            sizes = [size for size in kernel_sizes(8192) if size % 2 == odd]
            reached = {min(tuned, key=lambda tokens, size=size: abs(tokens - size)) for size in sizes}
            assert set(tuned) - reached <= {1}, odd  # one token is odd


@given(st.integers(1, 20_000))
def test_prefills_are_no_longer_than_allowed(most):
    sizes = kernel_sizes(most)
    assert sizes[0] == 1 and sizes[-1] <= most and sizes == sorted(set(sizes)) and len(sizes) < 60


@given(st.integers(2, 1900).map(lambda n: n + 0.5), st.sampled_from([2, 4, 8]))
def test_finer_numbers_bring_the_crossing_within_a_factor_of_one_and_a_quarter(at, ranks):
    sizes = [size for size in (2, 8, 32, 128, 512, 2048) if size >= ranks]
    for _ in range(ROUNDS):
        if wanted := finer(points(at, sizes=sizes), ranks):
            assert not set(wanted) & set(sizes) and all(size % ranks == 0 for size in wanted)
            sizes = sorted({*sizes, *wanted})
    if at > sizes[0]:
        low, high = max(n for n in sizes if n <= at), min(n for n in sizes if n > at)
        assert high <= max(1.26 * low, low + ranks)


def test_layouts_that_do_not_cross_need_no_finer_numbers():
    assert finer(points(1e-3, sizes=(2, 8, 32)), 2) == finer(points(1e6, sizes=(2, 8, 32)), 2) == []


@given(st.floats(0.1, 3), st.floats(1e-4, 0.1), st.floats(5, 60))
def test_what_is_begun_ends_in_time(fixed, each, budget):
    """With as much for every number, and as much for every prompt that is new."""
    sizes, spent, clock, before = [2, 8, 32, 128, 512, 1024], [], 0.0, 0
    for size, larger in zip(sizes, [*sizes[1:], None], strict=True):
        spent.append(fixed + each * (size - before))
        clock, before = clock + spent[-1], size
        if larger is None or (len(spent) >= 2 and clock + time_for(spent, larger / size) > budget):
            break
    clock += fixed * len(spent)  # TP
    assert clock <= max(budget, 4 * fixed + 8 * each) + 1e-6


def test_all_that_may_run_are_reached_within_the_budget():
    """Seen on an H200 with 512 requests: half of the budget was for EP, and twice the last time was taken for the next
    one's, so 128 were the last; TP was faster up to there, EP from 430 on."""
    assert 5.0 + time_for([0.9, 0.9, 1.2, 2.0], 4) <= 20


@given(
    st.floats(0.1, 3),
    st.floats(1e-4, 0.1),
    st.lists(st.integers(1, 255).map(lambda n: 2 * n), min_size=1, unique=True),
    st.floats(0, 40),
)
def test_finer_numbers_end_in_time_those_around_the_crossing_first(fixed, each, wanted, left):
    first = [2, 8, 32, 128, 512]
    spent = [fixed + each * (size - before) for size, before in zip(first, [0, *first], strict=False)]
    cost = Cost.of(spent, sum(spent) + fixed * len(spent), 512)
    taken = cost.affordable(sorted(wanted), points(100.0, sizes=first), left)
    assert set(taken) <= set(wanted) and taken == sorted(taken)
    if taken:
        assert 2 * fixed * len(taken) + each * taken[-1] <= left
    missing = sorted(set(wanted) - set(taken), key=lambda size: abs(math.log(size / 100)))
    if missing:  # the nearest of them would have taken too long beside those that lie nearer
        nearer = [size for size in taken if abs(math.log(size / 100)) <= abs(math.log(missing[0] / 100))]
        assert cost.seconds([*nearer, missing[0]]) > left


UNEVEN = {2: 1.364, 8: 1.076, 16: 1.073, 24: 1.034, 28: 0.965, 32: 0.956, 48: 1.033, 64: 1.009, 96: 1.021, 128: 1.012}
UNEVEN |= {192: 0.97, 256: 1.028, 384: 1.042, 512: 0.978}
"""EP's steps in TP's, of one engine on an H200 (benchmarks/calibration_h200.json, the first of its sweeps)."""


def uneven(sizes) -> list[Point]:
    known = sorted(UNEVEN)
    ratios = dict(zip(sizes, np.interp(np.log(sizes), np.log(known), [UNEVEN[n] for n in known]), strict=True))
    steps = [("tp", n, 0.004) for n in sizes] + [("ep", n, 0.004 * ratios[n]) for n in sizes]
    return [Point(layout=name, requests=n, step_s=s, error_s=1e-5, steps=24) for name, n, s in steps]


def test_numbers_around_one_that_is_off_do_not_decide():
    """Seen on an H200: at 28 and 32 requests TP was 4 % slower, at 16 to 24 and at 48 to 128 up to 3 % faster. With
    more numbers at 16 to 32 only, three calibrations said 26, and were sure of it; the sweep of all said 389."""
    sizes = [2, 8, 32, 128, 512]
    assert crossing(uneven([*sizes, 16, 20, 24, 28])).requests < 32
    for _ in range(ROUNDS):
        sizes = sorted({*sizes, *finer(uneven(sizes), ranks=2)})
    found = crossing(uneven(sizes))
    assert 256 <= found.requests <= 512 and 256 <= crossing(uneven(sorted(UNEVEN))).requests <= 512
    assert found.least < 48 and found.most is None


class SlowEngine:
    """Each step takes longer than the first pause between looks, and one that a look falls into is not counted."""

    config = SimpleNamespace(timeout_s=10.0)
    step_s = 0.06

    def __init__(self):
        self.looked = time.monotonic()

    async def async_step_times(self):
        now, before = time.monotonic(), self.looked
        self.looked = now
        return [
            (Layout.TP, 7, [1.0] * 30),
            (Layout.EP, 8, [self.step_s] * max(0, int((now - before) / self.step_s) - 1)),
        ]


async def test_steps_longer_than_a_pause_are_timed():
    """Seen on a busy CPU: no two steps in a row passed between two looks, and a calibration ended with an error."""
    found = await _time(SlowEngine(), Layout.EP, 8)
    assert found.steps >= STEPS and found.step_s == SlowEngine.step_s


async def test_steps_that_never_come_are_an_error_in_time():
    engine = SlowEngine()
    engine.config = SimpleNamespace(timeout_s=0.2)
    with pytest.raises(TimeoutError, match=r"9 requests should decode for 24 steps in ep, but did for 0 after 0\.2 s"):
        await _time(engine, Layout.EP, 9)
