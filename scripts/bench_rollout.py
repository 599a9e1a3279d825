"""Rollout benchmark, the paper's method: the same steps in static TP, static EP and switching, in one run.

    python scripts/bench_rollout.py                                   # a laptop: small model, 64 requests a step
    python scripts/bench_rollout.py --model Qwen3-235B-A22B --ranks 8 --requests 2048 --steps 9 --length-scale 1 \
        --threshold 256
    python scripts/bench_rollout.py --model ... --recorded runs/dump/step_1.jsonl

Response lengths are drawn from the lognormal through the paper's median and 99 % quantile (synthetic), or those of
recorded steps, and replayed exactly. Static means both layouts resident and one kept; scripts/bench_engine.py and
bench_decode.py compare that with stock SGLang. Writes a JSON file after each layout, and a PNG beside it.
"""

import json
import platform
import tempfile
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from contestants import device, model_or_tiny
from transformers import AutoConfig

from moebius_engine.config import SwitchConfig
from moebius_engine.telemetry import StepReport
from rollout.demo import POLICIES
from rollout.metrics import console_line
from rollout.plot import new_figure, png_colour
from rollout.replay.run import replay, started_actor
from rollout.replay.workload import Workload, dummy_prompts, read_workloads
from rollout.server_argument import server_argument
from rollout.simulate.trace import PAPER_CAP, rollout_steps

WARM_UP = 0  # number of the step that comes first and does not count


def main(
    out: Annotated[Path, typer.Option(help="JSON file; the PNG lies beside it.")] = Path("benchmarks/rollout.json"),
    model: Annotated[
        str | None,
        typer.Option(help="A checkpoint; a published model's name: its sizes, dummy weights; else a tiny one."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, help="P: processes that share the model.")] = 2,
    requests: Annotated[int, typer.Option(min=16, help="Of a step.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    length_scale: Annotated[float, typer.Option(help="Factor of the prompts' and responses' tokens.")] = 1 / 64,
    threshold: Annotated[int | None, typer.Option(min=1, help="T_h; an eighth of the requests if left out.")] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="T_h is what the engine measures at start.")] = False,
    recorded: Annotated[Path | None, typer.Option(help="A file of RolloutActor's dump_dir, for its lengths.")] = None,
    share_gpu: Annotated[bool, typer.Option("--share-gpu", help="All ranks on GPU 0; needs MPS.")] = False,
    seed: Annotated[int, typer.Option(help="Of the lengths.")] = 0,
    timeout_s: Annotated[float, typer.Option(help="Deadline of one step, in seconds.")] = 3600.0,
    changes: Annotated[list[str] | None, typer.Option("--set", help="argument=value of SGLang's server.")] = None,
) -> None:
    if calibrate and threshold is not None:
        raise typer.BadParameter(f"--threshold {threshold} and --calibrate: give one of them")
    if not calibrate:
        threshold = threshold or max(1, requests // 8)
    with tempfile.TemporaryDirectory() as folder:
        path, name, changes = model_or_tiny(model, folder, changes or [])
        vocabulary = AutoConfig.from_pretrained(path).vocab_size
        if recorded is None:
            workloads = drawn(requests, steps, length_scale, seed, vocabulary)
        else:
            workloads = read_workloads(recorded, vocabulary, lengths_only=True)
        setting = {
            "lengths": f"of {recorded.name}"
            if recorded
            else f"synthetic: lognormal, median 1,510, p99 10,386 tokens, times {length_scale:g}",
            "requests": requests,
            "threshold": threshold,
            "threshold is calibrated": calibrate,
            "model": name,
            "ranks": ranks,
            "ranks share one GPU": share_gpu,
            "static": "both layouts resident, one kept",
            "seed": seed,
            "server_arguments": changes,
            "device": device(),
            "versions": {package: version(package) for package in ("sglang", "torch")},
            "python": platform.python_version(),
            "date": date.today().isoformat(),
        }
        reports: dict[str, list[StepReport]] = {}
        # What a calibration finds splits the static layouts' steps into burst and tail too.
        for layout in sorted(POLICIES, key=lambda layout: calibrate and layout != "switching"):
            reports[layout] = []
            switch = SwitchConfig(
                policy=POLICIES[layout],  # type: ignore[arg-type]
                threshold=threshold,
                calibrate="off" if threshold else "auto",
                share_gpu=share_gpu,
            )
            arguments = dict(map(server_argument, changes))
            with started_actor(path, ranks, switch, arguments, None) as (actor, runner):
                runner.run(replay(actor, workloads, timeout_s, reports[layout].append))
            setting["threshold"] = threshold = reports[layout][0].threshold
            for report in reports[layout]:
                typer.echo(f"{layout}: {console_line(report)}")
            out.parent.mkdir(parents=True, exist_ok=True)
            done = {layout: reports[layout] for layout in POLICIES if layout in reports}
            out.write_text(json.dumps({"setting": setting, **table(done)}, indent=1) + "\n", encoding="utf-8")
    save_png(done, out.with_suffix(".png"), f"{name}, {ranks} ranks on {setting['device']}\n{setting['lengths']}")


def drawn(requests: int, steps: int, scale: float, seed: int, vocabulary: int) -> list[Workload]:
    """Synthetic steps, numbered from WARM_UP on: one more than asked for, since the first does not count."""
    made = []
    for number, trace in enumerate(rollout_steps(steps + 1, requests, seed=seed), start=WARM_UP):
        lengths = [max(1, round(tokens * scale)) for tokens in trace.responses]
        prompts = [[row] * max(1, round(tokens * scale)) for row, tokens in enumerate(trace.prompts)]
        sampling = [{"max_new_tokens": length, "ignore_eos": True} for length in lengths]
        made.append(Workload(number, dummy_prompts(prompts, vocabulary), sampling, lengths))
    assert max(max(workload.lengths) for workload in made) <= PAPER_CAP * scale + 1
    return made


def table(reports: dict[str, list[StepReport]]) -> dict[str, Any]:
    """One row a step, and means over the steps; the first step is left out. Speed-ups of switching over the static
    layout that was better, and worse, in that very step."""
    rows: list[dict[str, Any]] = []
    for step in zip(*(reports[layout] for layout in reports), strict=True):
        row: dict[str, Any] = {"step": step[0].step, "tokens": step[0].tokens, "longest": step[0].longest_response}
        for layout, report in zip(reports, step, strict=True):
            row[layout] = {
                "step_s": round(report.step_s, 4),
                "burst_s": round(report.burst_s, 4),
                "tail_s": round(report.tail_s, 4),
                "tokens_per_s": round(report.tokens_per_s, 1),
                "switch_ms": [round(ms, 2) for ms in report.switch_ms],
                "inflight_at_switch": report.inflight_at_switch,
            }
        if len(reports) == len(POLICIES):
            static = [row[layout]["step_s"] for layout in ("tp", "ep")]
            row["over_better"] = round(min(static) / row["switching"]["step_s"], 4)
            row["over_worse"] = round(max(static) / row["switching"]["step_s"], 4)
        rows.append(row)
    counted = [row for row in rows if row["step"] != WARM_UP] or rows
    found: dict[str, Any] = {"steps": rows, "first step left out": len(counted) < len(rows)}
    for ratio in ("over_better", "over_worse"):
        if ratio in rows[0]:
            values = [row[ratio] for row in counted]
            found[ratio] = {"mean": round(sum(values) / len(values), 4), "least": min(values), "most": max(values)}
    return found


def save_png(reports: dict[str, list[StepReport]], path: Path, title: str) -> None:
    """Bars of each step's burst and tail, and the in-flight count of the last step."""
    figure = new_figure(9, 6)
    bars, curves = figure.subplots(2)
    width = 0.8 / len(reports)
    for place, (layout, of_layout) in enumerate(reports.items()):
        counted = [report for report in of_layout if report.step != WARM_UP] or of_layout
        left = [report.step + (place - 1) * width for report in counted]
        colour = png_colour(layout)
        burst = [report.burst_s for report in counted]
        bars.bar(left, burst, width * 0.92, color=colour, label=layout)
        bars.bar(left, [report.tail_s for report in counted], width * 0.92, burst, color=colour, alpha=0.45)
        times, counts = _split(counted[-1].inflight)
        curves.step(times, counts, where="post", color=colour, label=layout)
    bars.set(xlabel="step", ylabel="seconds: burst, and tail (pale)")
    bars.xaxis.get_major_locator().set_params(integer=True)
    curves.set(xlabel="seconds since the last step began", ylabel="requests in flight")
    for axes in (bars, curves):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def _split(curve: Sequence[tuple[float, int]]) -> tuple[list[float], list[int]]:
    return [t_s for t_s, _ in curve], [count for _, count in curve]


if __name__ == "__main__":
    typer.run(main)
