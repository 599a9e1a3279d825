"""The page: one HTML file without links. Every text in it goes through jinja's escaping; the charts are SVG."""

from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rollout.report import charts
from rollout.report.compare import Speedup, gaps, mean, shared_steps, speedups, switch_costs, switching
from rollout.report.run import PHASES, TITLES, Run

CURVES = 6  # steps whose curves are drawn
OPEN_ROWS = 12  # of the table of steps; a longer one is folded
PHASE_NAMES = {phase: "KV" if phase == "kv" else phase for phase in PHASES}
TIMES = ("step_s", "burst_s", "tail_s")
OVER = {"over_tp": "TP", "over_ep": "EP", "better": "better", "worse": "worse"}
"""The speed-ups in the table: attribute of `Speedup`, heading."""


def render(runs: Sequence[Run]) -> str:
    """The page for these runs. Raises ValueError if there is none."""
    if not runs:
        raise ValueError("no run was given")
    environment = Environment(
        loader=PackageLoader("rollout.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(**_content(runs))


def headlines(runs: Sequence[Run]) -> list[str]:
    """One sentence a switching run that can be compared."""
    sentences = []
    for run in switching(runs):
        ratios = list(speedups(run, runs).values())
        if not ratios:
            continue
        counted = f"{len(ratios)} step{'s' if len(ratios) > 1 else ''}"
        if (better := _span(ratios, "better")) and (worse := _span(ratios, "worse")):
            sentences.append(f"{run.title}: {better} over the better static layout, {worse} over the worse, {counted}.")
        else:
            over = "over_tp" if ratios[0].over_tp is not None else "over_ep"
            sentences.append(f"{run.title}: {_span(ratios, over)} over {TITLES[over[-2:]]}, {counted}.")
    return sentences


def _content(runs: Sequence[Run]) -> dict[str, Any]:
    """What page.html names."""
    shared = shared_steps(runs)
    coloured = _coloured(runs)
    curve_runs = [(colour, run) for colour, run in coloured if run.has_curves]
    drawn = _evenly(shared, CURVES) if curve_runs else []
    ratios = {run.name: by_step for run in switching(runs) if (by_step := speedups(run, runs))}
    groups = charts.bar_groups(shared)
    labels = _bar_labels(groups, runs, ratios)
    costs = switch_costs(runs)
    return {
        "runs": coloured,
        "titles": TITLES,
        "headlines": headlines(runs),
        "gaps": gaps(runs),
        "shared": shared,
        "bars": Markup(charts.step_bars(coloured, groups, labels)) if shared else None,
        "binned": len(groups) < len(shared),
        "labelled": bool(labels),
        "rows": sorted({number for run in runs for number in run.steps}),
        "open_rows": OPEN_ROWS,
        "means": {
            run.name: {field: mean([getattr(run.steps[number], field) for number in shared]) for field in TIMES}
            for run in runs
        },
        "ratios": ratios,
        "ratio_means": {
            name: {field: mean([getattr(ratio, field) for ratio in by_step.values()]) for field in OVER}
            for name, by_step in ratios.items()
        },
        "over": OVER,
        "run_titles": {run.name: run.title for run in runs},
        "curves": [(number, Markup(charts.inflight_curves(curve_runs, number))) for number in drawn],
        "curve_runs": curve_runs,
        "curves_left_out": len(shared) - len(drawn),
        "costs": [(charts.cost_name(cost), cost) for cost in costs],
        "cost_bars": Markup(charts.phase_bars(costs)) if costs else None,
        "phases": PHASE_NAMES,
    }


def _coloured(runs: Sequence[Run]) -> list[charts.ColouredRun]:
    """TP and EP have colours of their own; those of the switching runs follow."""
    first = list(TITLES).index("switching")
    colours = {run.name: first + index for index, run in enumerate(switching(runs))}
    return [(colours.get(run.name, list(TITLES).index(run.kind)), run) for run in runs]


def _bar_labels(
    groups: Sequence[Sequence[int]], runs: Sequence[Run], ratios: dict[str, dict[int, Speedup]]
) -> list[str]:
    """Mean speed-up over the better static layout for each group of bars; none unless one switching run has them."""
    if len(switching(runs)) != 1 or not ratios:
        return []
    (by_step,) = ratios.values()
    means = [mean([by_step[number].better for number in group if number in by_step]) for group in groups]
    return ["" if value is None else f"{value:.2f}" for value in means] if any(means) else []


def _span(ratios: Sequence[Speedup], over: str) -> str | None:
    """ "1.22× (1.16 to 1.25)": the mean, and least and most if there are several; None if there is none."""
    values = [getattr(ratio, over) for ratio in ratios]
    middle = mean(values)
    if middle is None:
        return None
    return f"{middle:.2f}×" + (f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else "")


def _evenly(numbers: Sequence[int], count: int) -> list[int]:
    """At most `count` of them, first and last among them, evenly spread."""
    if len(numbers) <= count:
        return list(numbers)
    return [numbers[round(index * (len(numbers) - 1) / (count - 1))] for index in range(count)]
