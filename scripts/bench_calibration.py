"""Calibration against a full sweep of the same engine: do both find the same crossing?

python scripts/bench_calibration.py --ranks 2 --share-gpu --out benchmarks/calibration_h200.json
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from gpu_engine import server_args, setting, write_model

from moebius_engine.calibration.curve import crossing
from moebius_engine.calibration.measure import TOKENS, sweep
from moebius_engine.config import SwitchConfig
from moebius_engine.engine import SwitchingEngine


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    layers: Annotated[int, typer.Option(min=1)] = 8,
    most: Annotated[int, typer.Option(help="requests of the largest batch")] = 256,
    step: Annotated[int, typer.Option(help="requests from one batch of the sweep to the next")] = 8,
    context: Annotated[int, typer.Option(min=1, help="tokens that a request holds")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="calibrations")] = 3,
    share_gpu: Annotated[bool, typer.Option("--share-gpu", help="all ranks on GPU 0")] = False,
) -> None:
    sizes = list(range(step, most + 1, step))
    graphs = {size for count in sizes for size in (-(-count // ranks), count)}
    with tempfile.TemporaryDirectory() as folder:
        engine = SwitchingEngine(
            write_model(folder, layers),
            ranks=ranks,
            switch=SwitchConfig(policy="ep", share_gpu=share_gpu, timeout_s=60),
            **server_args(batch_sizes=graphs, requests=most, tokens=most * (context + TOKENS + 1)),
        )
        try:
            found = [engine.calibrate(context) for _ in range(repeats)]
            began = time.perf_counter()
            points, _ = engine.loop.run_until_complete(sweep(engine, sizes, context, until=float("inf")))
            seconds = time.perf_counter() - began
        finally:
            engine.shutdown()
    whole = crossing(points)
    report = {
        "setting": setting(ranks, layers, share_gpu, context=context),
        "sweep": {"step": step, "seconds": seconds, "crossing": whole.model_dump()},
        "calibrations": [{"seconds": c.seconds, "crossing": c.crossing.model_dump()} for c in found],
        "sweep_points": [p.model_dump() for p in points],
        "calibration_points": [p.model_dump() for p in found[0].points],
    }
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    typer.echo(json.dumps({key: report[key] for key in ("sweep", "calibrations")}))


if __name__ == "__main__":
    typer.run(main)
