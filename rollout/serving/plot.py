"""The paper's Figure 9 for your own runs: arrivals, requests in flight, TTFT and TPOT over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moebius_engine.telemetry import StepTrace
from rollout.plot import new_figure, png_colour
from rollout.serving.latency import Bin

_SWITCH_STYLES = {"ep": "--", "tp": ":"}  # by target


@dataclass(frozen=True)
class Served:
    """One server's run of a trace. trace: what its engine recorded, begun with the run."""

    bins: Sequence[Bin]
    trace: StepTrace


def save_png(runs: Mapping[str, Served], bursts: Sequence[tuple[float, float]], path: Path, title: str) -> None:
    """runs: by a name of rollout.plot.COLOURS. bursts: begin and end of each, in seconds. The arrivals are those of the
    first run, which all share."""
    figure = new_figure(9, 9)
    rate, inflight, ttft, tpot = figure.subplots(4, sharex=True)
    first = next(iter(runs.values())).bins
    width_s = first[1].begin_s if len(first) > 1 else 1.0
    begins = [one.begin_s for one in first]
    rate.step(begins, [one.requests / width_s for one in first], where="post", color="black")
    for name, run in runs.items():
        colour = png_colour(name)
        middles = [one.begin_s + width_s / 2 for one in run.bins]
        inflight.step(
            [sample.t_s for sample in run.trace.samples],
            [sample.inflight for sample in run.trace.samples],
            where="post",
            color=colour,
            linewidth=1,
            label=name,
        )
        # None is a gap in the line.
        ttft.plot(middles, [_or_gap(one.ttft_s) for one in run.bins], marker=".", color=colour)
        tpot.plot(middles, [_or_gap(one.tpot_s, 1e3) for one in run.bins], marker=".", color=colour)
        for record in run.trace.switches:
            if record.refused is None:
                for axes in (inflight, ttft, tpot):
                    axes.axvline(
                        record.started_at_s, color=colour, linestyle=_SWITCH_STYLES[record.target], linewidth=0.9
                    )
    for target, style in _SWITCH_STYLES.items():
        inflight.plot([], [], color="black", linestyle=style, linewidth=0.9, label=f"switch to {target.upper()}")
    for axes, label in (
        (rate, "arrivals [1/s]"),
        (inflight, "requests in flight"),
        (ttft, "mean TTFT [s]"),
        (tpot, "mean TPOT [ms]"),
    ):
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        for begin, end in bursts:
            axes.axvspan(begin, end, color="orange", alpha=0.15, linewidth=0)
    tpot.set_xlabel(f"time since the first request [s], bins of {width_s:g} s")
    tpot.set_xlim(left=0)
    inflight.legend(frameon=False, ncols=2)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _or_gap(value: float | None, unit: float = 1.0) -> float:
    return float("nan") if value is None else value * unit
