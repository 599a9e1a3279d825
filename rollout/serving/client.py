"""Sends a trace to an OpenAI-compatible server, each request at its time, and notes when its tokens come."""

import asyncio
import json
import time
from random import Random

import aiohttp

from rollout.serving.latency import Response
from rollout.simulate.trace import Trace


async def send_trace(url: str, trace: Trace, vocab_size: int, timeout_s: float, seed: int = 0) -> list[Response]:
    """Send every request of the trace to url/v1/completions as a stream, with random token ids as its prompt.

    Each response has exactly the length that the trace says. vocab_size: prompts are drawn from ids below it.
    timeout_s: deadline of each request. Raises RuntimeError for an answer that is none, or of another length, and
    TimeoutError after the deadline; the other requests are cancelled then.
    """
    draw = Random(seed)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(
        url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout, read_bufsize=1 << 20
    ) as session:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    _send(session, began, at, [draw.randrange(vocab_size) for _ in range(prompt)], length)
                )
                for at, prompt, length in zip(trace.arrivals_s, trace.prompts, trace.responses, strict=True)
            ]
    return [task.result() for task in tasks]


async def _send(session: aiohttp.ClientSession, began: float, at_s: float, prompt: list[int], length: int) -> Response:
    await asyncio.sleep(began + at_s - time.perf_counter())
    body = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    tokens_s: list[float] = []
    async with session.post("/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"the server answered {answer.status}: {(await answer.text())[:300]}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[len(b"data: ") :])
            if not event.get("usage"):
                raise RuntimeError(f"the server sent no usage with a chunk: {event}")
            # One chunk may bring several tokens.
            tokens_s += [time.perf_counter() - began] * (event["usage"]["completion_tokens"] - len(tokens_s))
    if len(tokens_s) != length:
        raise RuntimeError(f"a response has {len(tokens_s)} tokens, asked for were {length}")
    return Response(at_s, tuple(tokens_s))
