"""The demo: one rollout step three times on the same requests: static TP, static EP, and switching.

64 problems times 4 samples on a small random Qwen3-MoE made on the spot, with heavy-tailed response lengths. All three
runs must produce the same tokens, and the switching run must switch with requests in flight.
"""

import asyncio
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moebius_engine.telemetry import StepReport
from rollout.actor import RolloutActor
from rollout.plot import save_png, terminal_plot
from rollout.sample import Sample

# Policy of each run, in the order of running.
POLICIES = {"tp": "tp", "ep": "ep", "switching": "rollout"}

# Response lengths of DeepMath on Qwen3-235B (arXiv 2606.26607, section 6.3): median 1,510, p99 10,386, cap 32,768
# tokens. A lognormal through both quantiles, divided by 126, leaves a step that two CPU cores decode in seconds.
PAPER_MEDIAN, PAPER_P99, PAPER_CAP, SCALE = 1510, 10_386, 32_768, 126
NORMAL_P99 = 2.3263  # 99 % quantile of the standard normal distribution
# The paper switches 2,048 requests at T_h = 256: an eighth of the batch.
BATCH_TO_THRESHOLD = 8

CPU_NOTE = "On shared CPU cores no layout can win: this shows equal tokens and what a switch costs, not GPU speed."


@dataclass(frozen=True)
class DemoSettings:
    """ranks: processes, 2 or 4. problems: how many of the sample's 64. samples: responses to each problem."""

    ranks: int = 2
    problems: int = 64
    samples: int = 4
    seed: int = 0
    out: Path = Path("runs/demo")

    def __post_init__(self) -> None:
        if self.ranks not in (2, 4):
            raise ValueError(f"ranks must be 2 or 4: the demo's model has 8 experts and 4 heads; got {self.ranks}")
        if not 1 <= self.problems <= 64:
            raise ValueError(f"problems must be between 1 and the sample's 64, got {self.problems}")
        if self.samples < 1 or self.requests < 2 * BATCH_TO_THRESHOLD:
            raise ValueError(
                f"problems * samples must be at least {2 * BATCH_TO_THRESHOLD} requests, so that some are left in "
                f"flight at the switch; got {self.problems} * {self.samples} = {self.requests}"
            )
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"out must be a folder, and {self.out} is a file; name another")

    @property
    def requests(self) -> int:
        return self.problems * self.samples

    @property
    def threshold(self) -> int:
        """T_h [requests]."""
        return self.requests // BATCH_TO_THRESHOLD


@dataclass(frozen=True)
class Run:
    report: StepReport
    samples: list[Sample]


def response_lengths(count: int, seed: int) -> list[int]:
    """Lengths in tokens: a lognormal with the paper's shape, scaled down; the same for the same seed."""
    spread = math.log(PAPER_P99 / PAPER_MEDIAN) / NORMAL_P99
    draw = random.Random(seed)
    lengths = (round(PAPER_MEDIAN / SCALE * draw.lognormvariate(0.0, spread)) for _ in range(count))
    return [min(max(length, 1), PAPER_CAP // SCALE) for length in lengths]


def run_demo(settings: DemoSettings, console: Console, engine_factory: Callable[..., Any] | None = None) -> int:
    """Runs the three layouts, prints and writes what came out, and returns the exit code: 1 if the tokens differ, a
    request failed, or the switching run did not switch.

    Writes to `settings.out`: report.json, inflight.png, model/ and a folder of metrics for each run. engine_factory:
    called as SwitchingEngine, which it is by default.
    """
    from recipes.deepmath_sample import load_problems  # the data and model libraries take seconds to import
    from recipes.tiny_moe import byte_tokenizer, make_tiny_moe

    model = make_tiny_moe(settings.out / "model", seed=settings.seed)
    tokenizer = byte_tokenizer(max_length=4096)
    prompts = [tokenizer(question).input_ids for question in load_problems()["question"][: settings.problems]]
    lengths = response_lengths(settings.requests, settings.seed)
    console.print(
        f"{settings.problems} problems x {settings.samples} samples on {settings.ranks} ranks, responses of "
        f"{min(lengths)} to {max(lengths)} tokens, T_h = {settings.threshold} requests"
    )
    runs = {}
    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for name in POLICIES:
            runs[name] = _run_layout(name, settings, str(model), prompts, lengths, progress, engine_factory)

    reports = {name: run.report for name, run in runs.items()}
    fault = find_fault({name: run.samples for name, run in runs.items()}, lengths)
    summary = demo_summary(reports, tokens_equal=fault is None)
    (settings.out / "report.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    title = f"{settings.requests} requests on {settings.ranks} ranks"
    save_png(reports, settings.out / "inflight.png", title)
    colour = console.is_terminal and not console.no_color
    console.out(terminal_plot(reports, width=min(console.width, 100), colour=colour), highlight=False)
    console.print(_table(reports))
    console.print(CPU_NOTE, soft_wrap=True)
    console.print(f"Written: {settings.out}/report.json, {settings.out}/inflight.png", highlight=False)
    if fault is None and reports["switching"].inflight_at_switch is None:
        refusals = [switch.refused for switch in reports["switching"].switch_records if switch.refused]
        fault = f"the switching run did not switch to TP{': ' + refusals[-1] if refusals else ''}"
    if fault is not None:
        console.print(f"[bold red]FAILED[/]: {fault}")
        return 1
    console.print(f"[bold green]Equal tokens[/] in all three runs ({reports['switching'].tokens:,} each)")
    return 0


def find_fault(samples: Mapping[str, Sequence[Sample]], lengths: Sequence[int]) -> str | None:
    """What is wrong with the runs' samples, as a sentence: a response that ended early, or the first token that
    differs between two runs; None if nothing is."""
    for name, run in samples.items():
        for index, (sample, length) in enumerate(zip(run, lengths, strict=True)):
            if len(sample.output_ids) != length:
                return (
                    f"{name}: request {index} has {len(sample.output_ids)} of {length} tokens and ended with "
                    f"{sample.finish_reason}"
                )
    first, *others = samples
    for other in others:
        for index, (one, two) in enumerate(zip(samples[first], samples[other], strict=True)):
            if one.output_ids != two.output_ids:
                pairs = zip(one.output_ids, two.output_ids, strict=True)
                at = next(position for position, (a, b) in enumerate(pairs) if a != b)
                return (
                    f"tokens differ between {first} and {other}: request {index}, token {at} of {lengths[index]}: "
                    f"{one.output_ids[at]} and {two.output_ids[at]}"
                )
    return None


def demo_summary(reports: Mapping[str, StepReport], tokens_equal: bool) -> dict[str, Any]:
    """What report.json holds. Times in seconds, switch_ms in milliseconds."""
    keys = ("step_s", "burst_s", "tail_s", "tokens", "switches", "switch_ms")
    layouts = {name: {key: getattr(report, key) for key in keys} for name, report in reports.items()}
    return {"tokens_equal": tokens_equal, "layouts": layouts}


def _run_layout(
    name: str,
    settings: DemoSettings,
    model: str,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    progress: Progress,
    engine_factory: Callable[..., Any] | None,
) -> Run:
    task = progress.add_task(f"{name}: starting", total=len(lengths))
    with asyncio.Runner() as runner:
        # SGLang's engine takes the current loop at its start, so it must be the one that the batch runs in.
        asyncio.set_event_loop(runner.get_loop())
        actor = RolloutActor(
            model,
            ranks=settings.ranks,
            switch={"policy": POLICIES[name], "threshold": settings.threshold},
            server_args={
                "skip_tokenizer_init": True,
                "random_seed": settings.seed,
                "log_level": "error",
                # Room for the whole batch on one rank, as static TP needs it.
                "max_total_tokens": 2 * (settings.samples * sum(map(len, prompts)) + sum(lengths)),
                "max_running_requests": settings.ranks * settings.requests,
            },
            metrics_dir=settings.out / name,
            engine_factory=engine_factory,
        )
        try:
            return runner.run(_run_step(actor, settings.samples, prompts, lengths, progress, task, name))
        finally:
            actor.shutdown()


async def _run_step(
    actor: RolloutActor,
    n: int,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    progress: Progress,
    task: Any,
    name: str,
) -> Run:
    # Two tokens of something else first: what happens once in a process is no part of the step.
    await actor.generate_batch([[0] * 16], sampling={"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True})
    progress.reset(task, description=f"{name}: rollout")
    await actor.begin_step(0, requests=len(lengths))
    sampling = [{"max_new_tokens": length, "temperature": 0.0, "ignore_eos": True} for length in lengths]
    batch = asyncio.create_task(actor.generate_batch(prompts, n, sampling, timeout_s=600))
    while not batch.done():
        await asyncio.wait([batch], timeout=0.1)
        progress.update(task, completed=actor.progress()["done"])
    samples = [sample for samples_of_prompt in batch.result() for sample in samples_of_prompt]
    report = await actor.end_step()
    progress.update(task, completed=len(samples), description=f"{name}: {report.step_s:.1f} s")
    return Run(report, samples)


def _table(reports: Mapping[str, StepReport]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)  # 80 columns wide at most
    table.add_column("layout")
    for heading in ("step s", "burst s", "tail s", "switches", "in flight", "ms per switch", "tokens/s"):
        table.add_column(heading, justify="right")
    for name, report in reports.items():
        table.add_row(
            name,
            f"{report.step_s:.2f}",
            f"{report.burst_s:.2f}",
            f"{report.tail_s:.2f}",
            str(report.switches),
            "-" if report.inflight_at_switch is None else str(report.inflight_at_switch),
            f"{report.switch_ms_total / report.switches:.1f}" if report.switches else "-",
            f"{report.tokens_per_s:,.0f}",
        )
    return table
