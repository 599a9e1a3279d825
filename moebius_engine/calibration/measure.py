"""Times decode steps of both layouts on a running engine."""

import asyncio
import logging
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from moebius_engine.calibration.context import Longer
from moebius_engine.calibration.curve import Point, point
from moebius_engine.calibration.sizes import (
    ROUNDS,
    STEPS,
    TOKENS,
    Cost,
    finer,
    kernel_sizes,
    longer_batch,
    sizes_that_fit,
    time_for,
)
from moebius_engine.layout import Layout
from moebius_engine.telemetry import SwitchRecord

log = logging.getLogger(__name__)

_FIRST = 0.9  # of the time, for numbers of requests: finer ones in a range that is not covered say little
_POLL_S = 0.05  # each look at the engine costs it an exchange
_ASIDE = 8  # tokens that SGLang keeps back of a request's room (Scheduler.max_req_input_len), and one that is answered


class Measured(NamedTuple):
    """points: at the asked context. fits: the largest number of requests that could have been measured there. longer:
    at a longer context, if there was room and time. switches: made meanwhile. warm_up_s: of the batches before, in
    which kernels compile. seconds: of all that came after them."""

    points: list[Point]
    fits: int
    longer: Longer | None
    switches: list[SwitchRecord]
    warm_up_s: float
    seconds: float


async def measure(engine: Any, context: int, budget_s: float) -> Measured:
    """Both layouts at P, 4P, 16P, ... requests of `context` tokens each, at fewer of more tokens, and finer where they
    may cross.

    engine: an idle SwitchingEngine that no policy switches; it is left in EP, idle. budget_s: what measuring may take;
    larger numbers of requests that would take longer stay unmeasured, and a warning says so. Batches come before it, in
    which kernels compile that the first requests would else compile: on a fresh machine this may take a minute.

    Raises ValueError if fewer than two numbers of requests fit, TimeoutError as the engine does.
    """
    warming = time.monotonic()
    _check(engine, context)
    await engine.async_switch(Layout.EP)
    rank = (await engine.async_health())["ranks"][0]
    ep_tokens, tp_tokens = (rank["kv_tokens"][layout] for layout in (Layout.EP, Layout.TP))
    sizes = sizes_that_fit(engine.ranks, rank["max_running_requests"], ep_tokens, tp_tokens, context)
    await _warm_up(engine, sizes, context, min(ep_tokens, tp_tokens, engine.context_len) - _ASIDE)
    began = time.monotonic()
    deadline = began + budget_s
    first = await sweep(engine, sizes, context, until=began + _FIRST * budget_s)
    points, fits = first.points, sizes[-1]
    if (reached := max(p.requests for p in points)) < fits:
        text = "calibration: %d requests fit, but %g s were enough for %d; `moebius-rollout calibrate` may take longer"
        log.warning(text, fits, budget_s, reached)
    switches, longer = [first.switch], None
    batch = longer_batch(reached, engine.ranks, context, engine.context_len)
    # Twice what the largest number took in EP, which brought half of all tokens or more, and TP's steps.
    if batch is not None and time.monotonic() + 3 * first.spent[-1] < deadline:
        size, tokens = batch
        more = await sweep(engine, [size], tokens, until=deadline)
        longer, switches = Longer(context=tokens, points=tuple(more.points)), [*switches, more.switch]
    cost = Cost.of(first.spent, first.seconds, reached)
    for _ in range(ROUNDS):
        if not (sizes := cost.affordable(finer(points, engine.ranks), points, deadline - time.monotonic())):
            break
        more = await sweep(engine, sizes, context, until=deadline)
        points, switches = points + more.points, [*switches, more.switch]
        cost = Cost.of(more.spent, more.seconds, sizes[-1])  # what is first prefilled or compiled counts no more
    return Measured(points, fits, longer, switches, began - warming, time.monotonic() - began)


def _check(engine: Any, context: int) -> None:
    if context < 1:
        raise ValueError(f"context={context}: at least 1 token")
    if context + TOKENS > engine.context_len:
        raise ValueError(f"context={context} and {TOKENS} more: a request may have {engine.context_len} tokens")


async def _warm_up(engine: Any, sizes: Sequence[int], context: int, longest: int) -> None:
    """Kernels that compile when they are first used would count as what a number of requests takes, and larger ones be
    left out for it. longest: tokens that a prompt may have."""
    chunk = engine.server_args.chunked_prefill_size
    most = min(sizes[-1], -(-chunk // context) * engine.ranks) if chunk > 0 else sizes[-1]
    prompts = _prompts(engine, most, context)
    # A batch that fills a chunk of each rank; KV is moved by kernels, too.
    for target in (Layout.TP, Layout.EP):
        async with _decoding(engine, prompts):
            await engine.async_switch(target)
    if engine.server_args.device == "cpu":
        return
    for layout in (Layout.TP, Layout.EP):
        await engine.async_switch(layout)
        for tokens in kernel_sizes(min(chunk, longest) if chunk > 0 else longest):
            (prompt,) = _prompts(engine, 1, tokens, seed=f"{layout} {tokens}")  # no prefix that is cached
            await engine.async_generate_now(input_ids=prompt, sampling_params={"max_new_tokens": 1})


def _prompts(engine: Any, requests: int, context: int, seed: str | None = None) -> list[list[int]]:
    """The same for each seed, or for each context without one: the first ones of more."""
    draw = random.Random(context if seed is None else seed)
    return [[draw.randrange(10, engine.shape.vocab_size) for _ in range(context)] for _ in range(requests)]


class Sweep(NamedTuple):
    """switch: the one to TP. spent: seconds of each number of requests in EP, its prompts' prefill included. seconds:
    of all."""

    points: list[Point]
    switch: SwitchRecord
    spent: list[float]
    seconds: float


async def sweep(engine: Any, sizes: Sequence[int], context: int, until: float) -> Sweep:
    """EP at each of the sizes, upwards, so that prompts are prefilled once; then TP, which takes them over.

    until: monotonic seconds by which all should have ended: a larger size is begun only if it will (time_for), and TP's
    smaller ones are left out if it has not, but two in any case. Else as measure.
    """
    started, prompts = time.monotonic(), _prompts(engine, sizes[-1], context)
    points, spent, record = [], [], None
    for size, larger in zip(sizes, [*sizes[1:], None], strict=True):
        began = time.monotonic()
        async with _decoding(engine, prompts[:size]):
            points.append(await _time(engine, Layout.EP, size))
            now = time.monotonic()
            spent.append(now - began)
            last = larger is None or (len(spent) >= 2 and now + time_for(spent, larger / size) > until)
            if last:
                record = await engine.async_switch(Layout.TP)
                if record is None or record.refused:
                    raise RuntimeError(f"calibration could not switch to TP: {record and record.refused}")
                points.append(await _time(engine, Layout.TP, size))
        if last:
            break
    assert record is not None
    for measured, size in enumerate(sizes[: len(spent) - 1][::-1]):
        if measured and time.monotonic() > until:
            break
        async with _decoding(engine, prompts[:size]):
            points.append(await _time(engine, Layout.TP, size))
    await engine.async_switch(Layout.EP)
    return Sweep(points, record, spent, time.monotonic() - started)


@asynccontextmanager
async def _decoding(engine: Any, prompts: Sequence[Sequence[int]]) -> AsyncIterator[None]:
    """All of these prompts decode within it."""
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": TOKENS}
    batch = asyncio.ensure_future(engine.async_generate_now(input_ids=list(prompts), sampling_params=sampling))
    try:
        await until_all_decode(engine, len(prompts), batch)
        yield
    finally:
        await engine.async_abort(abort_all=True)
        await asyncio.wait_for(batch, engine.config.timeout_s)


async def until_all_decode(engine: Any, requests: int, batch: asyncio.Future[list[Any]]) -> None:
    """Wait until so many requests decode together, and nothing else is in flight. batch: their answers.

    Raises RuntimeError if they have ended before, TimeoutError after engine.config.timeout_s.
    """
    deadline = time.monotonic() + engine.config.timeout_s
    while True:
        if batch.done():
            ended = Counter(str(answer["meta_info"]["finish_reason"]) for answer in batch.result())
            raise RuntimeError(f"{requests} requests never decoded together; they ended by {ended}")
        health = await engine.async_health()
        waiting = any(rank["waiting"] or rank["prefilling"] for rank in health["ranks"])
        if health["inflight"] == requests and not waiting:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{requests} requests do not decode together after {engine.config.timeout_s} s")
        await asyncio.sleep(_POLL_S)


async def _time(engine: Any, layout: Layout, size: int) -> Point:
    """The next steps of `size` requests that decode. Raises TimeoutError if too few are seen."""
    await engine.async_step_times()
    deadline, pause, steps = time.monotonic() + engine.config.timeout_s, _POLL_S, list[float]()
    while len(steps) < STEPS:
        if time.monotonic() > deadline:
            seen = f"{len(steps)} after {engine.config.timeout_s} s"
            raise TimeoutError(f"{size} requests should decode for {STEPS} steps in {layout}, but did for {seen}")
        await asyncio.sleep(pause)
        for where, count, seconds in await engine.async_step_times():
            if (where, count) == (layout, size):
                steps.extend(seconds)
        # The steps that a look falls into are not counted; if they are longer than the pause, none is.
        pause = (STEPS - len(steps) + 2) * statistics.median(steps) if steps else 1.5 * pause
    return point(layout.value, size, steps)
