"""The charts, as SVG to stand inside a page: shapes and classes only, the page's style gives colours and text sizes.

A run of colour i has class `run<i>`, phase i class `phase<i>`. All charts are WIDTH units wide and scale with the page;
places are chosen for text of 14 units, which can be read on a phone, where WIDTH units are about 330 pixels.
"""

from collections.abc import Sequence
from itertools import pairwise
from xml.etree.ElementTree import Element, SubElement, tostring

from matplotlib.ticker import MaxNLocator

from rollout.report.compare import SwitchCost
from rollout.report.run import PHASES, Run, Step

WIDTH = 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 402, 24, 46  # the axes, and the room below them for labels
_HEIGHT = 260
GROUPS = 9  # of bars, that a phone can show apart; the paper's figure has nine steps
_WIDEST_BAR = 28.0
_LONGEST_NAME = 50  # letters that fit over a row

ColouredRun = tuple[int, Run]
"""The number of the run's colour, and the run."""


def bar_groups(numbers: Sequence[int]) -> list[list[int]]:
    """Step numbers in order, cut into at most GROUPS groups of nearly equal size."""
    count = min(GROUPS, len(numbers))
    edges = [round(index * len(numbers) / count) for index in range(count + 1)] if count else []
    return [list(numbers[start:end]) for start, end in pairwise(edges)]


def step_bars(runs: Sequence[ColouredRun], groups: Sequence[Sequence[int]], labels: Sequence[str]) -> str:
    """One bar a run and group of steps: the mean burst [s], solid, under the mean tail [s], hatched.

    labels: one a group, over its highest bar; empty for none.
    """
    svg, bottom = _canvas(_HEIGHT, "Step time split into burst and tail")
    times = [[[run.steps[number] for number in group] for _, run in runs] for group in groups]
    top = _axis(svg, bottom, max(_mean_s(steps, "step_s") for group in times for steps in group), "seconds")
    pitch = (_RIGHT - _LEFT) / len(groups)
    wide = min(_WIDEST_BAR, 0.84 * pitch / len(runs))
    for place, (group, numbers) in enumerate(zip(times, groups, strict=True)):
        middle, highest = _LEFT + (place + 0.5) * pitch, 0.0
        for index, ((colour, run), steps) in enumerate(zip(runs, group, strict=True)):
            x = middle + (index - len(runs) / 2) * wide
            burst, tail = (_mean_s(steps, name) * (bottom - _TOP) / top for name in ("burst_s", "tail_s"))
            title = f"{run.title}, {_span(numbers)}: {_mean_s(steps, 'step_s'):.3g} s"
            for part, y, height in (("burst", bottom - burst, burst), ("tail", bottom - burst - tail, tail)):
                for name in (f"run{colour}", "hatch")[: 1 + (part == "tail")]:
                    bar = _shape(svg, "rect", name, x=x, y=y, width=wide - 1, height=height)
                    SubElement(bar, "title").text = f"{title}, {part} {_mean_s(steps, part + '_s'):.3g} s"
            highest = max(highest, burst + tail)
        if labels:
            _text(svg, middle, bottom - highest - 5, labels[place], "middle", "strong")
        _text(svg, middle, bottom + 18, f"{numbers[0]}", "middle")
    single = all(len(numbers) == 1 for numbers in groups)
    _text(svg, (_LEFT + _RIGHT) / 2, bottom + 38, "rollout step" if single else "first of the rollout steps", "middle")
    return tostring(svg, encoding="unicode")


def inflight_curves(runs: Sequence[ColouredRun], number: int) -> str:
    """Requests in flight over time in one step, a circle at each switch, a line at T_h."""
    svg, bottom = _canvas(_HEIGHT, f"Requests in flight in step {number}")
    steps = [run.steps[number] for _, run in runs]
    curves = [step.inflight or () for step in steps]
    top = _axis(svg, bottom, max((count for curve in curves for _, count in curve), default=1), "requests in flight")
    ticks = MaxNLocator(5).tick_values(0, max(step.step_s for step in steps) or 1.0)
    scale_x, scale_y = (_RIGHT - _LEFT) / ticks[-1], (bottom - _TOP) / top
    for tick in ticks:
        _text(svg, _LEFT + tick * scale_x, bottom + 18, f"{tick:g}", "middle")
    _text(svg, (_LEFT + _RIGHT) / 2, bottom + 38, "seconds since the step began", "middle")
    for threshold in sorted({step.threshold for step in steps if step.threshold is not None}):
        y = bottom - threshold * scale_y
        if y >= _TOP:
            _shape(svg, "path", "threshold", d=f"M{_LEFT} {y:.1f}H{_RIGHT}")
            _text(svg, _RIGHT, y - 4, f"T_h = {threshold}", "end")
    for (colour, _), curve in zip(runs, curves, strict=True):
        points = [(_LEFT + t_s * scale_x, bottom - count * scale_y) for t_s, count in curve]
        _shape(svg, "path", f"curve run{colour}", d=_stairs(points))
    row = 0
    for (colour, _), step in zip(runs, steps, strict=True):
        for mark in step.marks:
            at = {"cx": _LEFT + max(mark.t_s, 0.0) * scale_x, "cy": bottom - mark.inflight * scale_y}
            circle = _shape(svg, "circle", f"mark run{colour}", r=5, **at)
            text = f"{mark.direction} {mark.ms:.0f} ms"
            SubElement(circle, "title").text = f"{text}, {mark.inflight} requests in flight"
            if mark is step.marks[-1]:
                right = at["cx"] > (_LEFT + _RIGHT) / 2
                x, y = at["cx"] + (4 if right else -4), at["cy"] - 24 - 15 * row
                _text(svg, x, y, text, "end" if right else "start", "strong")
                row += 1
    return tostring(svg, encoding="unicode")


def phase_bars(costs: Sequence[SwitchCost]) -> str:
    """One row a run and direction: the mean switch, its phases side by side [ms]."""
    row = 52
    svg, _ = _canvas(_TOP + row * len(costs), "Mean cost of a switch by phase")
    longest = max(cost.total_ms for cost in costs)
    scale = (WIDTH - 90) / longest if longest else 0.0
    for place, cost in enumerate(costs):
        y, x = 18 + place * row, 2.0
        _text(svg, x, y, _short(cost_name(cost)), "start")
        for index, phase in enumerate(PHASES):
            width = cost.phase_ms[phase] * scale
            bar = _shape(svg, "rect", f"phase{index}", x=x, y=y + 7, width=width, height=20)
            SubElement(bar, "title").text = f"{phase}: {cost.phase_ms[phase]:.2f} ms"
            x += width
        _text(svg, x + 6, y + 22, f"{cost.total_ms:.1f} ms", "start", "strong")
    return tostring(svg, encoding="unicode")


def cost_name(cost: SwitchCost) -> str:
    return f"{cost.run.title}, {cost.direction or 'both directions'}"


def _canvas(height: int, label: str) -> tuple[Element, float]:
    """(the drawing, the y of its horizontal axis)."""
    svg = Element("svg", {"viewBox": f"0 0 {WIDTH} {height}", "role": "img", "aria-label": label})
    return svg, height - _BOTTOM


def _axis(svg: Element, bottom: float, highest: float, label: str) -> float:
    """Draws the vertical axis from 0, and returns the value at its top."""
    ticks = MaxNLocator(4).tick_values(0, highest or 1.0)
    for tick in ticks:
        y = bottom - tick / ticks[-1] * (bottom - _TOP)
        _shape(svg, "path", "grid", d=f"M{_LEFT} {y:.1f}H{_RIGHT}")
        _text(svg, _LEFT - 6, y + 5, f"{tick:g}", "end")
    _text(svg, 2, 12, label, "start")
    return float(ticks[-1])


def _stairs(points: Sequence[tuple[float, float]]) -> str:
    """A path on which a value holds until the next one; points less than a fifth of a unit apart become one."""
    path, last = "", None
    for x, y in points:
        x = round(x * 5) / 5
        path += f"M{x:g} {y:.1f}" if last is None else (f"V{y:.1f}" if x == last else f"H{x:g}V{y:.1f}")
        last = x
    return path


def _shape(svg: Element, tag: str, name: str, **attributes: float | str) -> Element:
    values = {key: value if isinstance(value, str) else f"{value:.2f}" for key, value in attributes.items()}
    return SubElement(svg, tag, {"class": name, **values})


def _text(svg: Element, x: float, y: float, text: str, anchor: str, name: str = "") -> None:
    SubElement(svg, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "class": name}).text = text


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"


def _mean_s(steps: Sequence[Step], field: str) -> float:
    return sum(getattr(step, field) for step in steps) / len(steps)


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
