"""`moebius-rollout plan`: where the layouts cross, what a switch costs, and whether it pays. Needs no GPU."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from moebius_engine.costmodel.hardware import GPUS, LINKS
from moebius_engine.layout import Layout
from moebius_engine.memory.budget import GB
from moebius_engine.memory.presets import PRESETS
from rollout.failure import fail

if TYPE_CHECKING:
    from rollout.plan import Plan

TABLE_RANKS, TABLE_LINKS, TABLE_WIDTH = (4, 8, 16), ("nvlink", "infiniband-ndr"), 120


def plan_command(
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}.")],
    batch: Annotated[int, typer.Option(help="Requests of a rollout step.")],
    cap: Annotated[int, typer.Option(help="Tokens that a response may have.")],
    model: Annotated[
        str | None, typer.Option(help=f"A folder or file with config.json, or one of {', '.join(PRESETS)}.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="P: ranks that share the model.")] = None,
    link: Annotated[
        str, typer.Option(help=f"One of {', '.join(LINKS)}. InfiniBand joins two hosts; shared: one GPU.")
    ] = "nvlink",
    dispatch: Annotated[
        str, typer.Option(help="How EP's tokens reach their experts: none, as this engine does it, or deepep.")
    ] = "none",
    skew: Annotated[float, typer.Option(help="Tokens of the rank whose experts get most, over the mean.")] = 1.0,
    lengths: Annotated[
        Path | None, typer.Option(help="A step_N.jsonl of RolloutActor's dump_dir; the paper's lengths if left out.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="A calibration's file to fit to; the paper's numbers if left out.")
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="All known models, 4, 8 and 16 ranks, both links.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, in seconds and bytes.")] = False,
) -> None:
    """Print what a cost model expects of switching, and how far off the model is where it was fitted.

    Give --model and --ranks, or --table.
    """
    if table == (model is not None or ranks is not None):
        fail("give --model and --ranks, or --table, and not both")
    if not table and (model is None or ranks is None):
        fail(f"model={model} and ranks={ranks}: give both, or --table")
    from rollout.plan import Wish, make_plan, read_lengths

    cases = (
        [(name, count, kind) for name in PRESETS for count in TABLE_RANKS for kind in TABLE_LINKS]
        if table
        else [(model, ranks, link)]
    )
    try:
        seen = None if lengths is None else read_lengths(lengths)
        plans = [
            make_plan(
                Wish(
                    *(name, gpu, count, batch, cap, kind),  # type: ignore[arg-type]  # no None: checked above
                    dispatch=dispatch,  # type: ignore[arg-type]  # CostModel checks it
                    skew=skew,
                    lengths=seen,
                    calibration=calibration,
                )
            )
            for name, count, kind in cases
        ]
    except (ValueError, OSError) as error:
        fail(str(error))
    if as_json:
        made = [to_json(plan) for plan in plans]
        typer.echo(json.dumps({"plans": made} if table else made[0]))
    elif table:
        print_table(plans, Console(width=TABLE_WIDTH))
    else:
        print_plan(plans[0], Console())


def to_json(plan: "Plan") -> dict[str, Any]:
    wish, budget = plan.wish, plan.budget
    return {
        "model": wish.model,
        "gpu": wish.gpu,
        "ranks": wish.ranks,
        "link": wish.link,
        "dispatch": wish.dispatch,
        "batch": wish.batch,
        "cap": wish.cap,
        "crossing_requests": plan.crossing.requests,
        "faster_below": plan.crossing.below,
        "faster_above": plan.crossing.above,
        "switch_s": plan.switch_s,
        "total_bytes": budget and budget.total,
        "second_layout_bytes": budget and budget.second_layout,
        "tokens": budget and {"ep": budget.sizes.tokens * budget.sizes.ranks, "tp": budget.tp_tokens},
        "step_s": plan.step_s,
        "gain": plan.gain,
        "verdict": plan.verdict,
        "achieved": asdict(plan.fit.costs.achieved),
        "fit_errors": {residual.name: residual.error for residual in plan.fit.residuals},
    }


def print_plan(plan: "Plan", console: Console) -> None:
    wish, budget = plan.wish, plan.budget
    requests, kv_tokens = plan.switch_at
    to_tp, to_ep = (plan.switch_s[target] * 1e3 for target in (Layout.TP, Layout.EP))
    lines = [
        f"{wish.model} on {wish.ranks} ranks of {wish.gpu}, {wish.link}, {wish.batch:,} requests of at most "
        f"{wish.cap:,} tokens, moe_a2a_backend={wish.dispatch}",
        "",
        "Crossing      " + _crossing(plan),
        f"Switch        EP→TP {to_tp:.0f} ms, TP→EP {to_ep:.0f} ms, {requests:,} requests with {kv_tokens:,} KV tokens",
    ]
    if budget is not None:
        lines.append(
            f"Memory        {budget.total / GB:.1f} GB a rank, of them {budget.second_layout / GB:.1f} for TP beside "
            f"EP; {budget.sizes.tokens * budget.sizes.ranks:,} KV tokens in EP, {budget.tp_tokens:,} in TP"
        )
    if plan.step_s:
        names = {"ep": "EP alone", "tp": "TP alone", "rollout": "switching"}
        lines.append(
            "A step        " + ", ".join(f"{names[policy]} {seconds:.1f} s" for policy, seconds in plan.step_s.items())
        )
    lines += ["Verdict       " + plan.verdict, "", *_honesty([plan])]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def print_table(plans: Iterable["Plan"], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("model", "P", "link"):
        table.add_column(title)
    for title in ("crossing", "EP→TP ms", "TP→EP ms", "2nd layout GB", "EP s", "TP s", "switching s", "gain"):
        table.add_column(title, justify="right")
    plans = list(plans)
    for plan in plans:
        steps = [f"{plan.step_s[name]:.0f}" if name in plan.step_s else "-" for name in ("ep", "tp", "rollout")]
        table.add_row(
            *(plan.wish.model, str(plan.wish.ranks), plan.wish.link, _crossing(plan, short=True)),
            *(f"{plan.switch_s[target] * 1e3:.0f}" for target in (Layout.TP, Layout.EP)),
            "does not fit" if plan.budget is None else f"{plan.budget.second_layout / GB:.1f}",
            *steps,
            "-" if plan.gain is None else f"{plan.gain:.2f}",
        )
    console.print(table)
    console.print("\n".join(["", *_honesty(plans)]), markup=False, highlight=False, soft_wrap=True)


def _crossing(plan: "Plan", short: bool = False) -> str:
    at, below, above = plan.crossing.requests, plan.crossing.below.upper(), plan.crossing.above.upper()
    if at is None:
        return f"{above} always" if short else f"none: {above} is faster at any count up to {plan.wish.batch:,}"
    if below == "TP":
        return f"{at:.0f}" if short else f"{at:.0f} requests: TP is faster below, EP above"
    return f"{at:.0f} (EP below)" if short else f"{at:.0f} requests, but EP is faster below"


def _honesty(plans: list["Plan"]) -> list[str]:
    """What the numbers rest on."""
    plan = plans[0]
    source = (
        "the calibration" if plan.wish.calibration else "the paper's three numbers (Qwen3-235B-A22B, 8 H200, DeepEP)"
    )
    lines = [f"A model, not a measurement. Fitted to {source}; its errors there:"]
    lines += [f"  {residual.error:+6.1%}  {residual.name}" for residual in plan.fit.residuals]
    if plan.wish.skew == 1:
        lines.append("Experts are taken to be evenly busy; expert_skew of your step reports is for --skew.")
    if any(p.gain is not None and abs(p.gain - 1) < p.fit.worst for p in plans):
        lines.append("A gain that is smaller than the worst of these errors is not certain.")
    if any(p.wish.link.startswith("infiniband") for p in plans):
        lines.append("The engine does not run on several hosts yet; InfiniBand is arithmetic only.")
    return lines
