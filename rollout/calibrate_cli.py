"""`moebius-rollout calibrate`: from how many requests on EP is faster, measured on this machine."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rollout.failure import fail
from rollout.server_argument import server_argument

if TYPE_CHECKING:
    from moebius_engine.calibration.curve import Point
    from moebius_engine.calibration.store import Calibration


def calibrate_command(
    model: Annotated[str | None, typer.Option(help="A checkpoint; a small random model if left out.")] = None,
    ranks: Annotated[int, typer.Option(help="P: processes that share the model.")] = 2,
    context: Annotated[int, typer.Option(min=1, help="Tokens that each request holds.")] = 1024,
    budget_s: Annotated[float, typer.Option(min=1, help="Seconds for measuring, once kernels are compiled.")] = 20.0,
    share_gpu: Annotated[bool, typer.Option("--share-gpu", help="All ranks on GPU 0; needs MPS.")] = False,
    changes: Annotated[list[str] | None, typer.Option("--set", help="argument=value of SGLang's server.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the file goes; the engine looks in its cache.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A PNG of both curves.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The file's content.")] = False,
) -> None:
    """Time decode steps of both layouts, print where they cross, and keep it for SwitchConfig(calibrate="auto").

    An engine finds the file again by model, ranks, device, versions and kernels (back ends of attention and experts,
    CUDA graphs or none), whatever else its arguments are.
    """
    from moebius_engine.calibration.start import in_words  # like the engine, too slow for --help
    from moebius_engine.calibration.store import save

    try:
        arguments = dict(map(server_argument, changes or []))
        if model is None:
            from recipes.tiny_moe import make_tiny_moe

            with TemporaryDirectory() as made:
                found = measure(str(make_tiny_moe(made)), ranks, context, budget_s, share_gpu, arguments)
        else:
            found = measure(model, ranks, context, budget_s, share_gpu, arguments)
    except ValueError as error:
        fail(str(error))
    path = save(found, folder)
    if plot is not None:
        save_curves(found, plot)
    if as_json:
        typer.echo(json.dumps(found.model_dump()))
        return
    console = Console()
    console.print(curves_table(found))
    console.print(f"\n{in_words(found)}\n", highlight=False)
    for what, where in (("kept in", path), ("drawn in", plot)):
        if where is not None:
            console.print(f"{what} {where}", highlight=False, soft_wrap=True)


def measure(
    model: str, ranks: int, context: int, budget_s: float, share_gpu: bool, arguments: dict[str, Any]
) -> "Calibration":
    """Start an engine, calibrate it, stop it. Raises as SwitchingEngine and its calibrate do."""
    from moebius_engine.config import SwitchConfig
    from moebius_engine.engine import SwitchingEngine

    config = SwitchConfig(policy="ep", share_gpu=share_gpu)
    engine = SwitchingEngine(model, ranks=ranks, switch=config, **arguments)
    try:
        return engine.calibrate(context, budget_s)
    finally:
        engine.shutdown()


def curves_table(found: "Calibration") -> Table:
    """Both layouts' steps, one row for each number of requests."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("requests", "tokens each", "EP step, ms", "TP step, ms", "EP / TP"):
        table.add_column(title, justify="right")
    for context, points in found.by_context:
        for requests, ep, tp in _pairs(points):
            cells = (f"{1e3 * p.step_s:.2f} ± {1e3 * p.error_s:.2f}" for p in (ep, tp))
            table.add_row(str(requests), f"{context:,}", *cells, f"{ep.step_s / tp.step_s:.3f}")
    return table


def save_curves(found: "Calibration", path: Path) -> None:
    """Step time over requests, with two standard errors, and the crossing."""
    from rollout.plot import new_figure, png_colour

    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    pairs = _pairs(found.points)
    for layout, curve in (("ep", [ep for _, ep, _ in pairs]), ("tp", [tp for _, _, tp in pairs])):
        axes.errorbar(
            [p.requests for p in curve],
            [1e3 * p.step_s for p in curve],
            yerr=[2e3 * p.error_s for p in curve],
            marker="o" if layout == "ep" else "s",
            markersize=4,
            capsize=3,
            color=png_colour(layout),
            label=layout.upper(),
        )
    if (at := found.crossing.requests) is not None:
        axes.axvline(at, color="black", linestyle="--", linewidth=0.8, label=f"$T_h$ = {at:.0f} requests")
        if found.crossing.least is not None and found.crossing.most is not None:
            axes.axvspan(found.crossing.least, found.crossing.most, color="black", alpha=0.08, label="95 %")
    axes.set(xscale="log", xlabel="requests in flight", ylabel="decode step [ms]")
    axes.set_ylim(bottom=0)
    setting = found.setting
    where = f"{setting.ranks} ranks{' that share one' if setting.share_gpu else ','} {setting.device}"
    model = "{layers} layers of {experts} experts".format_map(setting.model)
    axes.set_title(f"{where}, {model}, {setting.context} tokens a request", fontsize=10)
    sizes = [requests for requests, _, _ in pairs]
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _pairs(points: Sequence["Point"]) -> list[tuple[int, "Point", "Point"]]:
    times = {(p.layout, p.requests): p for p in points}
    return [(n, times["ep", n], times["tp", n]) for n in sorted({p.requests for p in points})]
