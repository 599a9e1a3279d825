"""`moebius-rollout verify`: switch with requests in flight, and compare with engines that never switched.

Three engines on the same model (a small random one by default), one after the other. Stock SGLang in static TP, then in
static EP: the weights of each rank after a fresh start, and the answers of an unswitched run. Then the switching
engine, fed all the time and switched both ways:

- KV: inside every switch, all that was moved is compared byte for byte, by request and position
  (SwitchConfig.check_bytes). With what it was before the move, not with a static run: the layouts sum in different
  orders, so the KV that they compute differs in the last bits.
- Weights: after the first and the last switch into each layout, every parameter, byte for byte, with the fresh start.
- Tokens and logprobs: every answer, with both unswitched runs. Without the requests on which these two differ, and some
  may differ by as little as rounding does where two experts' router scores are equal (findings.py).

In bfloat16 rounding alone changes tokens from layout to layout. There the tokens that a run drew are given to the same
engine once more, as a prompt, and the logprobs of drawing and of reading them are compared. How far these lie apart
without any switch is what the static runs show.
"""

import asyncio
import itertools
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moebius_engine.checkpoint import read_hf_config
from moebius_engine.config import SwitchConfig
from moebius_engine.layout import Layout
from moebius_engine.layout.shape import ModelShape, check_ranks
from moebius_engine.vitals import EngineDead
from rollout.checksum import Digests, checksum
from rollout.findings import Answer, Findings
from rollout.forced import ForcedFindings

Request = Mapping[str, Any]

# A switch shall find requests in every state: more streams than may run at once, prompts longer than a chunk.
STREAMS_PER_RANK, RUNNING_PER_RANK, CHUNK_PER_RANK = 4, 3, 64
PROMPT_TOKENS, RESPONSE_TOKENS = (8, 200), (12, 48)  # short and long prompts; the shortest and longest response
REQUESTS_PER_STREAM = 2  # distinct ones: the streams go round them until the last switch
STEPS_BETWEEN = 3  # forward steps from one switch to the next
DEADLINE_S = 600.0  # of every wait for a running engine; a busy machine decodes slowly


def model_shape(ranks: int) -> dict[str, Any]:
    """Arguments of make_tiny_moe for P = `ranks`: P divides all that is cut. An even P of 4 or more gets half as many
    KV heads, so that two ranks hold each."""
    kv_heads = ranks // 2 if ranks >= 4 and ranks % 2 == 0 else ranks
    return {
        "experts": 4 * ranks,
        "intermediate": 32 * ranks,
        "q_heads": 2 * ranks,
        "kv_heads": kv_heads,
        "vocab_size": 256 * ranks,
    }


def make_requests(count: int, vocab_size: int, seed: int = 0) -> list[Request]:
    """Greedy requests of mixed lengths. Every fourth prompt is long, and all long ones share their first half.

    Returns: keyword arguments of SwitchingEngine.generate, the same for the same seed.
    """
    draw = random.Random(seed)
    short, long = PROMPT_TOKENS
    prefix = [draw.randrange(vocab_size) for _ in range(long // 2)]
    requests: list[Request] = []
    for number in range(count):
        is_long = number % 4 == 3
        own = [draw.randrange(vocab_size) for _ in range(long - len(prefix) if is_long else short)]
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": draw.randint(*RESPONSE_TOKENS)}
        prompt = prefix + own if is_long else own
        requests.append(
            {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
        )
    return requests


def run(
    switches: int,
    ranks: int,
    dtype: str = "float32",
    share_gpu: bool = False,
    model: str | None = None,
    server_args: Mapping[str, Any] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Switch `switches` times on P = `ranks` ranks. Returns Findings.result.

    dtype: "float32" or "bfloat16". share_gpu: all ranks on GPU 0 (SwitchConfig.share_gpu). model: a checkpoint's
    folder, by default a small random one is made. server_args: SGLang's, instead of those that this function would
    choose. console: where progress and the reasons of a failure go, by default standard error. Raises ValueError for a
    model that P ranks cannot hold and for a server argument that cannot be, TimeoutError if an engine does not answer
    within DEADLINE_S. The engines are stopped in any case.
    """
    server_args = server_args or {}
    if "dtype" in server_args:
        raise ValueError(f"dtype={server_args['dtype']!r} as a server argument: give it as verify's own, --dtype")
    console = console or Console(stderr=True)
    exact = dtype == "float32"
    findings = Findings() if exact else ForcedFindings()
    streams = ranks * STREAMS_PER_RANK
    fresh: dict[Layout, Digests] = {}
    unswitched: dict[str, list[Answer]] = {}
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as progress:
        model = model or _small_model(folder, ranks)
        shape = ModelShape.from_hf_config(read_hf_config(model, server_args))
        check_ranks(shape, ranks)
        requests = make_requests(streams * REQUESTS_PER_STREAM, shape.vocab_size)
        for layout in (Layout.TP, Layout.EP):
            task = progress.add_task(f"static {layout}", total=len(requests))
            static = SwitchConfig(policy="off", static_layout=layout, share_gpu=share_gpu)
            began = time.monotonic()
            with _engine(model, ranks, dtype, static, server_args) as engine:
                fresh[layout] = engine.weight_digests()
                answers = engine.loop.run_until_complete(
                    _answer_all(engine, requests, lambda task=task: progress.advance(task))
                )
                unswitched[f"static {layout}"] = answers
                if isinstance(findings, ForcedFindings):
                    for drawn in unswitched.values():  # also what the layout before this one has drawn
                        findings.add_unswitched(drawn, _read(engine, requests, drawn))
            _say(console, f"static {layout}: {len(requests)} answers", began)
        chosen = findings.choose(unswitched) if exact else range(len(requests))
        if not findings.faults:
            task, began = progress.add_task("switching", total=switches), time.monotonic()
            config = SwitchConfig(policy="ep", check_bytes=True, timeout_s=DEADLINE_S, share_gpu=share_gpu)
            with _engine(model, ranks, dtype, config, server_args) as engine:
                switcher = _switch_all(engine, switches, fresh, findings, lambda: progress.advance(task))
                numbered: list[tuple[int, Answer]] = []
                feeding = _feed_while(engine, requests, chosen, streams, switcher)
                try:
                    numbered = engine.loop.run_until_complete(feeding)
                except* EngineDead as dead:
                    findings.faults.append(str(dead.exceptions[0]))
                if isinstance(findings, ForcedFindings) and numbered:
                    numbers, answers = zip(*numbered, strict=True)
                    findings.add_switched(numbers, answers, _read(engine, [requests[n] for n in numbers], answers))
            _say(console, f"switching: {len(findings.inflight)} switches, {len(numbered)} answers", began)
            if exact:
                for number, answer in numbered:
                    findings.add_answer(number, answer, {name: run_[number] for name, run_ in unswitched.items()})
    for number, reason in findings.undecided.items():
        console.print(f"Undecided: request {number} {reason}", markup=False, highlight=False, soft_wrap=True)
    for reason in findings.faults:
        console.print(f"FAILED: {reason}", markup=False, highlight=False, soft_wrap=True)
    return findings.result()


def _say(console: Console, what: str, began: float) -> None:
    """A line where there is no terminal to draw the progress on."""
    if not console.is_terminal:
        console.print(f"{what}, {time.monotonic() - began:.0f} s", highlight=False)


def _small_model(folder: str, ranks: int) -> str:
    from recipes.tiny_moe import make_tiny_moe  # the model library takes seconds to import

    return str(make_tiny_moe(folder, **model_shape(ranks)))


@contextmanager
def _engine(model: str, ranks: int, dtype: str, switch: SwitchConfig, server_args: Mapping[str, Any]) -> Iterator[Any]:
    from moebius_engine.engine import SwitchingEngine  # imports SGLang, which takes seconds

    with asyncio.Runner() as runner:
        asyncio.set_event_loop(runner.get_loop())  # SGLang takes the current loop at its start
        engine = SwitchingEngine(
            model,
            ranks=ranks,
            switch=switch,
            **{
                "skip_tokenizer_init": True,
                "dtype": dtype,
                "max_running_requests": ranks * RUNNING_PER_RANK,
                "chunked_prefill_size": ranks * CHUNK_PER_RANK,
                **_gpu_arguments(ranks, switch.share_gpu),
                **server_args,
            },
        )
        try:
            yield engine
        finally:
            engine.shutdown()


def _gpu_arguments(ranks: int, share_gpu: bool) -> dict[str, Any]:
    """Exact float32, so that the two layouts draw the same tokens; none on a CPU, where it is exact anyhow."""
    import torch

    if not torch.cuda.is_available():
        return {}
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # else Triton multiplies float32 as tf32
    running = ranks * RUNNING_PER_RANK
    return {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_custom_all_reduce": share_gpu,  # SGLang's own refuses ranks that share a GPU
        "cuda_graph_bs": sorted({1, RUNNING_PER_RANK, running}),
        "max_total_tokens": running * (PROMPT_TOKENS[1] + RESPONSE_TOKENS[1]),
        "mem_fraction_static": 0.4,
    }


async def _answer(engine, request: Request) -> Answer:
    try:
        return await asyncio.wait_for(engine.async_generate(**request), DEADLINE_S)
    except TimeoutError as error:
        raise TimeoutError(f"a request was not answered within {DEADLINE_S} s") from error


async def _answer_all(engine, requests: Sequence[Request], done) -> list[Answer]:
    async def one(request: Request) -> Answer:
        answer = await _answer(engine, request)
        done()
        return answer

    return await asyncio.gather(*map(one, requests))


def _read(engine, requests: Sequence[Request], answers: Sequence[Answer]) -> list[Answer]:
    """The same prompts with their answers' tokens appended, read in one prefill each, from no cached prefix."""
    engine.flush_cache()
    again = [
        {
            "input_ids": [*request["input_ids"], *answer["output_ids"]],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": len(request["input_ids"]) - 1,
        }
        for request, answer in zip(requests, answers, strict=True)
    ]
    return engine.loop.run_until_complete(_answer_all(engine, again, lambda: None))


async def _feed_while(
    engine, requests: Sequence[Request], chosen: Sequence[int], streams: int, work
) -> list[tuple[int, Answer]]:
    """Keep `streams` of the chosen requests in flight until `work` is done. Returns (index, answer) of all of them."""
    answers: list[tuple[int, Answer]] = []
    turns = itertools.cycle(chosen)
    working = asyncio.create_task(work)

    async def stream() -> None:
        while not working.done():
            number = next(turns)
            answers.append((number, await _answer(engine, requests[number])))

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(stream())
        await working
    return answers


async def _switch_all(engine, switches: int, fresh: Mapping[Layout, Digests], findings: Findings, done) -> None:
    """Switch to TP, to EP, and so on; stop at the first switch that fails."""
    for number in range(1, switches + 1):
        target = Layout.TP if number % 2 else Layout.EP
        await _wait_for_steps(engine, STEPS_BETWEEN)
        findings.add_switch(number, await engine.async_switch(target))
        if findings.faults:
            return
        if number <= 2 or number > switches - 2:
            found = await engine.async_weight_digests()
            findings.add_weights(f"weights after switch {number} to {target}", fresh[target], found)
            findings.checksums[target.value] = checksum(found)
        done()


async def _wait_for_steps(engine, steps: int) -> None:
    """Wait until rank 0 has run so many more forward steps."""
    deadline = time.monotonic() + DEADLINE_S
    first = (await engine.async_health())["ranks"][0]["forward_ct"]
    while (await engine.async_health())["ranks"][0]["forward_ct"] < first + steps:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the engine did not run {steps} forward steps within {DEADLINE_S} s")
        await asyncio.sleep(0.002)
