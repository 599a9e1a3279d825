"""Inputs of the report's tests: JSON lines of synthetic traces, and real wandb offline runs of made-up numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

from moebius_engine.telemetry import StepReport, StepTrace, SwitchRecord, TraceSample, to_json_line
from rollout.phases import step_report


def synthetic(kind: str, step: int, burst_s: float, tail_s: float, tokens: int = 100) -> StepReport:
    """`step_report` of a trace that falls below T_h = 4 after burst_s, with a switch there if kind is "switching"."""
    layouts = ("ep", "tp") if kind == "switching" else (kind, kind)
    end = burst_s + tail_s
    samples = [
        TraceSample(t_s=t_s, inflight=inflight, tokens=done, layout=layout)
        for t_s, inflight, done, layout in (
            *((0, 8, 0, layouts[0]), (burst_s / 2, 6, tokens // 4, layouts[0])),
            *((burst_s, 3, tokens // 2, layouts[1]), (end, 0, tokens, layouts[1])),
        )
        if end or not t_s
    ]
    switches = [switch(step, burst_s)] if kind == "switching" else []
    return step_report(StepTrace(step=step, samples=samples, switches=switches), [tokens], threshold=4)


def switch(step: int, started_at_s: float, **changes) -> SwitchRecord:
    times = {"decide_ms": 1, "metadata_ms": 2, "kv_ms": 3, "weights_ms": 4, "rest_ms": 5, "total_ms": 15}
    counts = {"running": 3, "waiting": 0, "prefilling": 0, "kv_tokens": 9, "forward_ct": 7, "kv_bytes": 1}
    names = {"source": "ep", "target": "tp", "reason": "policy", "step": step}
    return SwitchRecord(**names | counts | times | {"weight_bytes": 1, "started_at_s": started_at_s} | changes)


def write_lines(folder: Path, reports) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "steps.jsonl"
    path.write_text("".join(to_json_line(report) for report in reports), encoding="utf-8")
    return path


def three_runs(folder: Path) -> Path:
    """Two steps of static TP, static EP and switching, in folders of these names, as the demo lays them."""
    times = {"tp": ((4, 2), (6, 2)), "ep": ((2, 6), (4, 8)), "switching": ((2, 2), (4, 2))}
    for kind, steps in times.items():
        write_lines(folder / kind, [synthetic(kind, step, *both) for step, both in enumerate(steps, start=1)])
    return folder


_LOGGER = """
import json, sys
import wandb
from moebius_engine.telemetry import StepReport
from rollout.verl_plugin.curves import log_curves
folder, config, lines, curves = json.loads(sys.argv[1])
wandb.init(project="moebius", dir=folder, mode="offline", config=config)  # as verl's Tracking does
for step, line in lines:
    log_curves([([StepReport(**report)], []) for report in curves.get(str(step), ())], step)
    wandb.log(line, step=step)
wandb.finish()
"""


def wandb_run(folder: Path, config: dict, lines: list[tuple[int, dict]], curves=None) -> Path:
    """The folder of a real offline run, logged by a process of its own, since wandb keeps one run a process.

    curves: step → the replicas' reports, whose requests in flight the verl plug-in plots beside the step's line.
    """
    folder.mkdir(parents=True)
    environment = os.environ | {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    plotted = {step: [report.model_dump(mode="json") for report in reports] for step, reports in (curves or {}).items()}
    arguments = [sys.executable, "-c", _LOGGER, json.dumps([str(folder), config, lines, plotted])]
    subprocess.run(arguments, env=environment, check=True, timeout=120)
    (run,) = (folder / "wandb").glob("offline-run-*")
    return run


def verl_config(**moebius) -> dict:
    return {"actor_rollout_ref": {"rollout": {"name": "moebius", "engine_kwargs": {"moebius": moebius}}}}
