"""Steps from a .wandb file: what verl's trainer, or WandbSink, logged as `moebius/<name>`.

The file is read by wandb's own `wandb leet inspect --json`, which prints one record a line and uses no network here.
wandb has no reader in Python any more.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moebius_engine.config import SwitchConfig
from rollout.metrics import METRICS, PREFIX
from rollout.report.run import PHASES, Cost, Kind, Step
from rollout.verl_plugin.metrics import STEP_METRICS
from rollout.verl_plugin.settings import OWN_KEYS

_TIMEOUT_S = 300.0
_KNOWN = {metric.field for metric in METRICS} | {metric.name for metric in STEP_METRICS}
_REPLICA = re.compile(r"replica_(\d+)/(.+)")
_POLICIES: Mapping[str, Kind] = {"tp": "tp", "ep": "ep", "rollout": "switching", "interactive": "switching"}


def read_run(path: Path) -> tuple[list[Step], Kind | None, list[str]]:
    """(steps, the kind that verl's configuration names, what wandb's reader remarked).

    Raises ValueError for a file that wandb cannot read, a metric `moebius/...` that is not known, and a step line that
    lacks one; the last two with the record's number.
    """
    records, remarks = _records(path)
    settings: SwitchConfig | None = None
    steps = []
    for record in records:
        if record["type"] == "run":
            settings = _settings(record["run"].get("config", {}).get("update", {}), path) or settings
        elif record["type"] == "history":
            where = f"{path}, record {record['num']}"
            step = _step(record["history"]["item"], settings.threshold if settings else None, where)
            if step is not None:
                steps.append(step)
    return steps, _POLICIES.get(settings.policy) if settings else None, remarks


def _records(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    offline = os.environ | {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
    try:
        done = subprocess.run(command, env=offline, capture_output=True, encoding="utf-8", timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{path}: wandb did not read it within {_TIMEOUT_S:g} s") from error
    remarks = [line.removeprefix("wandb leet inspect: ") for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        raise ValueError(f"{path}: wandb cannot read it: {' '.join(remarks)}")
    return [json.loads(line) for line in done.stdout.splitlines()], [f"wandb's reader: {text}." for text in remarks]


def _settings(config: Mapping[str, Any], path: Path) -> SwitchConfig | None:
    """What verl's `actor_rollout_ref.rollout` tells a moebius rollout; None for a run that is no such one."""
    rollout = (config.get("actor_rollout_ref") or {}).get("rollout") or {}
    if rollout.get("name") != "moebius":
        return None
    given = (rollout.get("engine_kwargs") or {}).get("moebius") or {}
    try:
        return SwitchConfig(**{name: value for name, value in given.items() if name not in OWN_KEYS})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: its engine_kwargs.moebius is not of this version: {error}") from error


def _step(item: Mapping[str, Any], threshold: int | None, where: str) -> Step | None:
    """None for a line of other metrics, or one before a rollout step has ended."""
    # A plot or a table (curves.py) is several keys, NAME._type, NAME.path and so on.
    media = tuple(key.removesuffix("_type") for key in item if key.endswith("._type"))
    ours = {
        key.removeprefix(PREFIX): value
        for key, value in item.items()
        if key.startswith(PREFIX) and not key.startswith(media)
    }
    if "step_s" not in ours:
        return None
    replicas: dict[str, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    for name, value in ours.items():
        match = _REPLICA.fullmatch(name)
        (replicas.setdefault(match[1], {}) if match else whole)[match[2] if match else name] = value
    parts = list(replicas.values()) or [whole]
    for part in (whole, *parts):
        _check(part, where)
    # Times of several replicas are maxima, each for itself; only the slowest one's own burst and tail make up its step.
    slowest = max(parts, key=lambda part: part["step_s"])
    at_end = whole.get("layout_at_end")
    switches = sum(part["switches"] for part in parts)
    phase_ms = {phase: sum(part[f"switch_ms_{phase}"] for part in parts) for phase in PHASES}
    return Step(
        number=int(item.get("training/global_step", whole.get("step", item["_step"]))),
        step_s=slowest["step_s"],
        burst_s=slowest["burst_s"],
        tail_s=slowest["tail_s"],
        tokens=int(whole["tokens_burst"] + whole["tokens_tail"]),
        threshold=whole.get("threshold", threshold),
        layout_at_end=at_end if at_end is None or isinstance(at_end, str) else ("tp" if at_end else "ep"),
        switched=bool(switches or whole["refused_switches"]),
        costs=(Cost(None, int(switches), phase_ms),) if switches else (),
        inflight=None,
        marks=(),
    )


def _check(part: Mapping[str, Any], where: str) -> None:
    if unknown := sorted(set(part) - _KNOWN):
        raise ValueError(f"{where}: unknown metrics {[PREFIX + name for name in unknown]}")
    needed = ("step_s", "burst_s", "tail_s", "tokens_burst", "tokens_tail", "switches", "refused_switches")
    for name in (*needed, *(f"switch_ms_{phase}" for phase in PHASES)):
        if not isinstance(part.get(name), int | float):
            raise ValueError(f"{where}: {PREFIX}{name} should be a number, and is {part.get(name)!r}")
