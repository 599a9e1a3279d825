"""Draws what scripts/bench_switch.py has measured: a switch by phase, over the KV tokens in flight.

python scripts/bench_switch_plot.py benchmarks/switch_2xh200.json
"""

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout.plot import new_figure

PHASES = {  # Okabe-Ito colours
    "decide": ("the step in flight ends", (0.60, 0.60, 0.60)),
    "weights": ("weights", (0.00, 0.45, 0.70)),
    "metadata": ("requests, beyond weights", (0.90, 0.62, 0.00)),
    "kv": ("KV", (0.00, 0.62, 0.45)),
    "rest": ("votes, rebuilding batches", (0.80, 0.47, 0.65)),
}
TITLES = {"tp": "EP → TP", "ep": "TP → EP"}


def main(report: Annotated[Path, typer.Argument(help="The JSON file; the PNG is written beside it.")]) -> None:
    save_png(json.loads(report.read_text(encoding="utf-8")), report.with_suffix(".png"))


def save_png(report: dict[str, Any], path: Path) -> None:
    figure = new_figure(9, 4.5)
    setting = report["setting"]
    room = setting["ranks"] * setting["KV tokens a rank"]
    rows = sorted(report["rows"], key=lambda row: (row["requests"], row["samples"], row["prompt"]))
    for axes, (way, title) in zip(figure.subplots(1, 2, sharey=True), TITLES.items(), strict=True):
        bottoms = [0.0] * len(rows)
        for phase, (label, colour) in PHASES.items():
            heights = [row["median_ms"][way][f"{phase}_ms"] for row in rows]
            axes.bar(range(len(rows)), heights, 0.7, bottoms, color=colour, label=label)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        axes.set_xticks(range(len(rows)), [_label(row, way, room) for row in rows], fontsize=8)
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("milliseconds, sum of each phase's median")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=len(labels), fontsize=8)
    shared = ", which share one GPU" if setting["ranks share one GPU"] else ""
    figure.suptitle(f"{setting['ranks']} ranks on {setting['gpu']}{shared}\n{setting['model']}", fontsize=10)
    figure.savefig(path)


def _label(row: dict[str, Any], way: str, room: int) -> str:
    tokens = statistics.mean(record["kv_tokens"] for record in row["records"] if record["target"] == way)
    shared = f"\n{row['samples']} a prompt" if row["samples"] > 1 else ""
    return f"{row['requests']} requests{shared}\n{tokens / 1000:,.0f} k tokens\n{tokens / room:.0%} of KV"


if __name__ == "__main__":
    typer.run(main)
