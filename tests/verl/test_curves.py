"""In-flight curves in wandb, in a real offline run."""

import json
import time
from pathlib import Path

import pytest

from rollout.verl_plugin.curves import log_curves
from tests.verl.test_metrics import report


@pytest.fixture
def run(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    made = wandb.init(mode="offline", dir=tmp_path, project="moebius")
    yield made
    made.finish()


def test_a_line_for_each_replica_and_step_beside_verls_own_metrics(run):
    log_curves([([report(4.0)], []), ([report(6.0)], [])], step=1)
    run.log({"timing_s/step": 9.0}, step=1)  # as verl's Tracking does
    run.finish()
    deadline = time.monotonic() + 60  # wandb's own process writes it
    while not (files := list(Path(run.dir).rglob("*.table.json"))):
        assert time.monotonic() < deadline, f"no table in {run.dir}"
        time.sleep(0.1)
    (file,) = files
    lines: dict[str, list[tuple[float, int]]] = {}
    for seconds, name, count in json.loads(file.read_text(encoding="utf-8"))["data"]:
        lines.setdefault(name, []).append((seconds, count))
    assert lines == {
        "replica 0, step 0": [(0.0, 8), (2.0, 1), (4.0, 0)],
        "replica 1, step 0": [(0.0, 8), (3.0, 1), (6.0, 0)],
    }


def test_without_a_run_nothing_happens():
    log_curves([([report(4.0)], [])], step=1)
