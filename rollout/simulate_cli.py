"""`moebius-rollout simulate`: policies side by side on a rollout workload or a serving trace. Needs no GPU."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from moebius_engine.config import PAPER_THRESHOLD
from moebius_engine.costmodel.hardware import GPUS, LINKS
from moebius_engine.memory.presets import PRESETS
from rollout.failure import fail

if TYPE_CHECKING:
    from rollout.simulate.compare import ServingRow, StepsRow
    from rollout.simulate.machine import Machine

WORKLOADS = ("rollout", "serving")


def simulate_command(
    workload: Annotated[
        str, typer.Option(help="rollout: synthetic steps. serving: the bursty trace. Or a step_N.jsonl of dump_dir.")
    ] = "rollout",
    policy: Annotated[list[str] | None, typer.Option(help="Repeat to choose some; all that fit if left out.")] = None,
    model: Annotated[
        str, typer.Option(help=f"A folder or file with config.json, or one of {', '.join(PRESETS)}.")
    ] = "Qwen3-235B-A22B",
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}.")] = "H200",
    ranks: Annotated[int, typer.Option(help="P: ranks of one replica.")] = 8,
    replicas: Annotated[int, typer.Option(help="Engines that share each step's requests.")] = 1,
    link: Annotated[str, typer.Option(help=f"One of {', '.join(LINKS)}.")] = "nvlink",
    dispatch: Annotated[str, typer.Option(help="Of EP's tokens: none, as this engine does it, or deepep.")] = "none",
    threshold: Annotated[int, typer.Option(help="T_h, in requests of one replica.")] = PAPER_THRESHOLD,
    running: Annotated[int, typer.Option(help="Requests that one replica decodes at once.")] = 2048,
    mem_fraction: Annotated[float, typer.Option(help="SGLang's mem_fraction_static.")] = 0.85,
    steps: Annotated[int, typer.Option(help="Rollout steps.")] = 9,
    requests: Annotated[int, typer.Option(help="Requests of a step, over all replicas.")] = 2048,
    median: Annotated[int, typer.Option(help="Median of the response lengths, in tokens.")] = 1510,
    p99: Annotated[int, typer.Option(help="Their 99 % quantile, in tokens.")] = 10_386,
    cap: Annotated[int, typer.Option(help="Longest response, in tokens.")] = 32_768,
    seed: Annotated[int, typer.Option(help="Seed of the synthetic lengths.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, in seconds.")] = False,
) -> None:
    """Replay a workload event by event under several policies. A simulation: step times come from the cost model."""
    from moebius_engine.costmodel.costs import CostModel
    from moebius_engine.costmodel.hardware import Cluster
    from moebius_engine.costmodel.moe import MoeModel
    from moebius_engine.costmodel.paper import paper_fit
    from rollout.budget_cli import read_config
    from rollout.simulate.compare import compare_serving, compare_steps
    from rollout.simulate.machine import from_costs
    from rollout.simulate.strategies import STRATEGIES
    from rollout.simulate.trace import bursty_trace, recorded_steps, rollout_steps

    serving = workload == "serving"
    known = [name for name in STRATEGIES if not (serving and name in ("oracle", "learned", "payoff"))]
    chosen: list[Any] = policy or list(known)
    try:
        if unknown := [name for name in chosen if name not in known]:
            raise ValueError(f"policy={unknown[0]!r}: for workload={workload!r} use some of {known}")
        if serving and replicas != 1:
            raise ValueError(f"replicas={replicas}: a serving trace runs on one")
        for name, value in (("threshold", threshold), ("steps", steps), ("requests", requests)):
            if value < 1:
                raise ValueError(f"{name}={value}: at least 1")
        config = read_config(model)
        costs = CostModel(
            MoeModel.from_hf_config(config),
            Cluster.of(gpu, ranks, link),
            paper_fit().costs.achieved,
            dispatch,  # type: ignore[arg-type]  # CostModel checks it
        )
        name = f"{model} on {ranks}x{gpu}, {link}"
        machine = from_costs(name, costs, config["max_position_embeddings"], running, mem_fraction)
        began = time.perf_counter()
        if serving:
            rows: list[Any] = compare_serving(machine, bursty_trace(seed), threshold, chosen)
        else:
            synthetic = workload == "rollout"
            if not synthetic and not Path(workload).is_file():
                raise ValueError(f"workload={workload!r} is no file, and none of {list(WORKLOADS)}")
            traces = (
                rollout_steps(steps, requests, median, p99, cap, seed) if synthetic else recorded_steps(Path(workload))
            )
            rows = compare_steps(machine, traces, threshold, chosen, replicas)
    except (ValueError, OSError) as error:
        fail(str(error))
    wall_s = time.perf_counter() - began
    if as_json:
        made = {"machine": name, "replicas": replicas, "workload": workload, "wall_s": wall_s}
        typer.echo(json.dumps(made | {"rows": [asdict(row) for row in rows]}))
        return
    console = Console()
    console.print(f"Simulation: {name}, {replicas} replica(s), threshold {threshold} requests", highlight=False)
    console.print(_serving_table(rows) if serving else _steps_table(rows))
    if not serving:
        console.print("least, mean, most: times as fast as the better static layout, by step.", highlight=False)
    console.print(_note(machine, wall_s), highlight=False)


def _note(machine: "Machine", wall_s: float) -> str:
    from moebius_engine.costmodel.paper import paper_fit

    return (
        f"Step times: cost model of {machine.ranks} ranks, fitted to three numbers of arXiv 2606.26607, up to "
        f"{paper_fit().worst:.0%} off there. Simulated in {wall_s:.1f} s."
    )


def _table(*numbers: str) -> Table:
    """A row for each policy. numbers: titles of the columns after its name."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", no_wrap=True)
    for title in numbers:
        table.add_column(title, justify="right")
    return table


def _steps_table(rows: "list[StepsRow]") -> Table:
    table = _table("total s", "least", "mean", "most", "over worse", "switches", "declined", "refused")
    for row in rows:
        gains = (min(row.over_better), fmean(row.over_better), max(row.over_better), max(row.over_worse))
        counts = (row.switches, row.declined, row.refused)
        table.add_row(row.strategy, f"{row.total_s:,.1f}", *(f"{gain:.3f}" for gain in gains), *map(str, counts))
    return table


def _serving_table(rows: "list[ServingRow]") -> Table:
    table = _table("end s", "switches", "TTFT mean s", "p99 s", "worst 10 s", "TPOT mean ms")
    for row in rows:
        seconds = (row.ttft_mean, row.ttft_p99, row.ttft_worst_bin)
        table.add_row(
            *(row.strategy, f"{row.seconds:.1f}", str(row.switches)),
            *(f"{value:.2f}" for value in seconds),
            f"{1e3 * row.tpot_mean:.1f}",
        )
    return table
