"""Calibration against a full sweep of the same engine: do both find the same crossing?

    python scripts/bench_calibration.py --ranks 2 --layers 8 --share-gpu --out benchmarks/calibration_h200.json

Writes a JSON file after each calibration and after the sweep, and a PNG of the sweep beside it.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from gpu_engine import MODEL, Weights, server_args, setting, tokens_per_rank, write_model, write_weights

from moebius_engine.calibration.curve import crossing
from moebius_engine.calibration.measure import sweep
from moebius_engine.calibration.sizes import TOKENS
from moebius_engine.calibration.store import Calibration
from moebius_engine.config import SwitchConfig
from moebius_engine.engine import SwitchingEngine
from rollout.calibrate_cli import save_curves

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
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="written and loaded, 2 bytes a parameter; else dummy ones")
    ] = False,
    changes: Annotated[list[str], typer.Option("--set", help="argument=value of SGLang's server")] = [],  # noqa: B006
) -> None:
    sizes = sorted(size)
    weights: Weights = "random" if random_weights else "dummy"
    report: dict[str, Any] = {"setting": setting(ranks, model, layers, share_gpu, changes, weights, context=context)}
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, model, layers)
        if random_weights:
            write_weights(folder)
            changes = ["load_format=auto", *changes]
        engine = SwitchingEngine(
            folder,
            ranks=ranks,
            switch=SwitchConfig(policy="ep", share_gpu=share_gpu, timeout_s=60),
            **server_args(sizes, ranks, tokens_per_rank(sizes[-1], context + TOKENS + 1, ranks), share_gpu, changes),
        )
        try:
            found = []
            report["calibrations"] = []
            for _ in range(repeats):
                found.append(engine.calibrate(context))
                report["calibrations"].append(_summary(found[-1]))
                report["calibration_points"] = [p.model_dump() for p in found[0].points]
                report["calibration_longer"] = found[0].longer and found[0].longer.model_dump()
                _write(out, report)
            began = time.perf_counter()
            points = engine.loop.run_until_complete(sweep(engine, sizes, context, until=float("inf"))).points
            report["sweep"] = {"seconds": time.perf_counter() - began, "crossing": crossing(points).model_dump()}
            report["sweep_points"] = [p.model_dump() for p in points]
            _write(out, report)
        finally:
            engine.shutdown()
    swept = found[0].model_copy(update={"points": tuple(points), "crossing": crossing(points)})
    save_curves(swept, out.with_suffix(".png"))


def _summary(found: Calibration) -> dict[str, Any]:
    return {
        "warm_up_s": found.warm_up_s,
        "seconds": found.seconds,
        "crossing": found.crossing.model_dump(),
        "requests": sorted({p.requests for p in found.points}),
    }


def _write(out: Path, report: dict[str, Any]) -> None:
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    typer.echo(json.dumps({key: value for key, value in report.items() if not key.endswith("points")}))


if __name__ == "__main__":
    typer.run(main)
