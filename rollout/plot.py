"""In-flight count over time of several runs of one step, with the switches marked: as a PNG and in the terminal."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moebius_engine.telemetry import StepReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe-Ito colours (told apart with any colour vision), as (terminal RGB) and for the PNG alike.
COLOURS: dict[str, tuple[int, int, int]] = {"tp": (0, 114, 178), "ep": (230, 159, 0), "switching": (0, 158, 115)}
OTHER = (120, 120, 120)
# Told apart without colour too.
SYMBOLS = {"tp": "·", "ep": "+", "switching": "•"}


def png_colour(name: str) -> tuple[float, ...]:
    """A run's colour as matplotlib takes it."""
    return tuple(part / 255 for part in COLOURS.get(name, OTHER))


def new_figure(width: float, height: float) -> "Figure":
    """A figure that no window shows. width, height: in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_png(reports: Mapping[str, StepReport], path: Path, title: str) -> None:
    """One curve a run and a mark at each of its switches. The runs share one threshold line, that of the first."""
    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    for name, report in reports.items():
        colour = png_colour(name)
        axes.step(*_curve(report), where="post", color=colour, linewidth=1.8, label=f"{name}: {report.step_s:.1f} s")
        for t_s, count, text in _marks(report):
            axes.plot([t_s], [count], marker="o", markersize=8, color=colour, markeredgecolor="black", zorder=3)
            axes.annotate(
                text, (t_s, count), xytext=(30, 40), textcoords="offset points", arrowprops={"arrowstyle": "-"}
            )
    threshold = next(iter(reports.values())).threshold
    axes.axhline(threshold, color="black", linestyle="--", linewidth=0.8, label=f"$T_h$ = {threshold} requests")
    axes.set(xlabel="time since the step began [s]", ylabel="requests in flight", title=title)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def terminal_plot(reports: Mapping[str, StepReport], width: int = 80, height: int = 20, colour: bool = True) -> str:
    """The same picture in characters, `width` by `height` cells; with ANSI colours unless `colour` is False."""
    import plotext

    figure = plotext.figure
    figure.clear()  # plotext has one global figure
    figure.theme("clear")  # the terminal's own background
    figure.plot_size(width, height)
    for name, report in reports.items():
        rgb = COLOURS.get(name, OTHER)
        signal = figure.signal(*_stairs(report), marker=plotext.marker(SYMBOLS.get(name, "x"), rgb))
        signal.lines()
        signal.label(f"{name}: {report.step_s:.1f} s")
        figure.draw(signal)
        for t_s, count, text in _marks(report):
            figure.draw(figure.signal([t_s], [count], marker=plotext.marker("◆", rgb)))
            figure.draw(figure.text(t_s, count, f"◆ {text}", alignment="left"))
    threshold = next(iter(reports.values())).threshold
    figure.line(threshold, style="dotted", label=f"T_h = {threshold} requests")
    figure.ruler("y").lim(0)
    figure.ruler("x").lim(0)
    end_s = max(t_s for report in reports.values() for t_s, _ in report.inflight)
    top = max(count for report in reports.values() for _, count in report.inflight)
    figure.legend(x=end_s, y=top, ha="right", va="top", relative=True)  # the corner that a shrinking batch leaves free
    figure.label("time since the step began [s]", "x")
    figure.title("requests in flight")
    return figure.build().string(colorless=not colour)


def _curve(report: StepReport) -> tuple[list[float], list[int]]:
    """Times [s] and in-flight counts; a count holds until the next time."""
    return [t_s for t_s, _ in report.inflight], [count for _, count in report.inflight]


def _stairs(report: StepReport) -> tuple[list[float], list[int]]:
    """`_curve` with the corners of the steps put in, for a plotter that only knows straight lines."""
    times, counts = _curve(report)
    corner_times = [t_s for t_s in times for _ in range(2)][1:]
    corner_counts = [count for count in counts for _ in range(2)][:-1]
    return corner_times, corner_counts


def _marks(report: StepReport) -> list[tuple[float, int, str]]:
    """(time [s], requests in flight, text) of each committed switch."""
    return [
        (switch.started_at_s, switch.inflight, f"{switch.source}→{switch.target} in {switch.total_ms:.0f} ms")
        for switch in report.switch_records
        if switch.refused is None
    ]
