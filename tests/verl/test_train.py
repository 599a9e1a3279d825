"""`moebius-rollout train --tiny`: the loop on a laptop, and what is refused before it starts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
from typer.testing import CliRunner

from rollout.cli import app
from rollout.train_cli import COLUMNS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "only --tiny runs here"),
        (["--tiny", "--steps", "0"], "steps must be at least 1, got 0"),
        (["--tiny", "--policy", "both"], "policy='both' is unknown"),
        (["--tiny", "--policy", "off"], "policy='off' is unknown: use one of ['rollout', 'interactive', 'ep', 'tp']"),
    ],
)
def test_a_bad_argument_is_refused(options, message):
    result = CliRunner().invoke(app, ["train", *options])
    assert result.exit_code == 2 and message in result.stderr


@pytest.mark.loop
@pytest.mark.timeout(720)
def test_twelve_steps_learn_and_each_switches_with_requests_in_flight(tmp_path):
    """Each sample draws by a seed of its own, so a machine gives the same rewards in every run."""
    command = [str(Path(sys.executable).with_name("moebius-rollout")), "train", "--tiny", "--out", str(tmp_path)]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # Ray refused to start, with "2 GPU, but ... contains []"
    subprocess.run(command, check=True, timeout=700, stdout=subprocess.DEVNULL, env=hidden)
    steps = json.loads((tmp_path / "steps.json").read_text())
    assert [step["step"] for step in steps] == list(range(1, 13))
    for step in steps:
        assert step.keys() == {"step", *COLUMNS}
        assert step["switches"] >= 1 and step["inflight_at_switch"] >= 1
        # Of a taught model rounding changes some probabilities by up to 1e-5 (README); other weights by 1e-2.
        assert step["probs_diff_max"] < 1e-4
    rewards = [step["reward_mean"] for step in steps]
    assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.05
