"""Calibration against a full sweep of the same engine: do both find the same crossing?

    python scripts/bench_calibration.py --ranks 2 --layers 8 --share-gpu --out benchmarks/calibration_h200.json

Writes a JSON file after the calibrations and after the sweep, and a PNG beside it.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from gpu_engine import MODEL, server_args, setting, tokens_per_rank, write_model

from moebius_engine.calibration.curve import Crossing, Point, crossing
from moebius_engine.calibration.measure import TOKENS, sweep
from moebius_engine.config import SwitchConfig
from moebius_engine.engine import SwitchingEngine
from moebius_engine.layout import Layout
from rollout.plot import png_colour

SIZES = [8, 16, 24, 32, 48, 64, 96, 128, 192, 256]


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    model: Annotated[str, typer.Option(help="a published model's name, for its sizes")] = MODEL,
    layers: Annotated[int | None, typer.Option(min=1, help="the model's if left out")] = None,
    size: Annotated[list[int], typer.Option(help="requests of a batch of the sweep; given several times")] = SIZES,
    context: Annotated[int, typer.Option(min=1, help="tokens that a request holds")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="calibrations")] = 3,
    share_gpu: Annotated[bool, typer.Option("--share-gpu", help="all ranks on GPU 0")] = False,
) -> None:
    sizes = sorted(size)
    graphs = {per_rank for count in sizes for per_rank in (-(-count // ranks), count)}
    report: dict[str, Any] = {"setting": setting(ranks, model, layers, share_gpu, context=context)}
    with tempfile.TemporaryDirectory() as folder:
        engine = SwitchingEngine(
            write_model(folder, model, layers),
            ranks=ranks,
            switch=SwitchConfig(policy="ep", share_gpu=share_gpu, timeout_s=60),
            **server_args(
                graphs, sizes[-1] + ranks, tokens_per_rank(sizes[-1], context + TOKENS + 1, ranks), share_gpu
            ),
        )
        try:
            found = [engine.calibrate(context) for _ in range(repeats)]
            report["calibrations"] = [{"seconds": c.seconds, "crossing": c.crossing.model_dump()} for c in found]
            report["calibration_points"] = [p.model_dump() for p in found[0].points]
            _write(out, report)
            began = time.perf_counter()
            points, _ = engine.loop.run_until_complete(sweep(engine, sizes, context, until=float("inf")))
            report["sweep"] = {"seconds": time.perf_counter() - began, "crossing": crossing(points).model_dump()}
            report["sweep_points"] = [p.model_dump() for p in points]
            _write(out, report)
        finally:
            engine.shutdown()
    _save_png(points, [c.crossing for c in found], out.with_suffix(".png"), report["setting"])


def _write(out: Path, report: dict[str, Any]) -> None:
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    typer.echo(json.dumps({key: value for key, value in report.items() if not key.endswith("points")}))


def _save_png(points: list[Point], calibrated: list[Crossing], path: Path, setting: dict[str, Any]) -> None:
    """Step time over the requests that decode, the sweep's crossing as a line and the calibrations' as dots."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for layout in Layout:
        curve = sorted((p.requests, 1e3 * p.step_s) for p in points if p.layout == layout)
        axes.plot(*zip(*curve, strict=True), marker="o", color=png_colour(layout), label=layout.upper())
    whole = crossing(points).requests
    if whole is not None:
        axes.axvline(whole, color="black", linestyle="--", linewidth=0.8, label=f"sweep: equal at {whole:.0f}")
    dots = [found.requests for found in calibrated if found.requests is not None]
    if dots:
        middle = statistics.median(dots)
        axes.plot(dots, [axes.get_ylim()[0]] * len(dots), "k^", label=f"calibrations: {middle:.0f} (median)")
    axes.set(xlabel="requests that decode", ylabel="decode step [ms]", xscale="log", yscale="log")
    axes.set_title(f"{setting['ranks']} ranks, {setting['gpu']}; {setting['model']}\n{setting['context']} tokens each")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
