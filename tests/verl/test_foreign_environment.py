"""The wheel in an environment that this project has not made: verl and SGLang as their own packages ask for them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
INSTALLED = ("verl[verl-core]==0.9.1", "sglang==0.5.12", "torch==2.11.0")
# What every environment with both needs: verl refuses the one version of transformers that SGLang pins.
OVERRIDES = "transformers==5.9.0\nkernels<0.13\n"
NOT_ON_A_CPU = ROOT / "requirements/cpu-excludes.txt"
NO_NETWORK = ("Failed to fetch", "network connectivity is disabled", "dns error", "Could not connect")

FOUND = """
import verl
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry
print("moebius" in RolloutReplicaRegistry._registry, ("moebius", "async") in _ROLLOUT_REGISTRY)
"""
RESOLVED = """
import verl
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class
print(get_rollout_replica_class("moebius").__name__, get_rollout_class("moebius", "async").__name__)
"""
LOADED = """
from sglang.srt.plugins import load_plugins_by_group
print(load_plugins_by_group("sglang.srt.plugins")["moebius"][1])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("foreign")


def run(folder: Path, *command: str | Path, **environment: str) -> str:
    """What a command prints, in a folder from which nothing of this tree can be imported."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "SGLANG_", "PYTHON"))}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=own | environment, capture_output=True, text=True, timeout=900
    )
    if done.returncode and any(words in done.stderr for words in NO_NETWORK):
        pytest.skip(f"the package index cannot be reached: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def python(folder) -> Path:
    """An interpreter with verl and SGLang, without our requirements."""
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed")
    run(folder, "uv", "venv", "--quiet", "--python", sys.executable, "venv")
    (folder / "overrides.txt").write_text(OVERRIDES)
    limits = ["--overrides", "overrides.txt"] + ([] if Path("/dev/nvidia0").exists() else ["--excludes", NOT_ON_A_CPU])
    run(folder, "uv", "pip", "install", "--quiet", "--python", "venv", *limits, *INSTALLED)
    return folder / "venv/bin/python"


@pytest.fixture(scope="module")
def packages(folder, python) -> tuple[set[str], set[str]]:
    """The environment's packages before and after the wheel was installed."""

    def freeze() -> set[str]:
        return set(run(folder, "uv", "pip", "freeze", "--quiet", "--python", "venv").splitlines())

    before = freeze()
    run(folder, "uv", "build", "--quiet", "--out-dir", "dist", ROOT)
    run(folder, "uv", "pip", "install", "--quiet", "--python", "venv", "--no-deps", *folder.glob("dist/*.whl"))
    return before, freeze()


def test_the_wheel_changes_no_package(packages):
    before, after = packages
    assert before < after
    (ours,) = after - before
    assert ours.startswith("moebius-rollout")


def test_verl_finds_the_plug_in_without_a_variable(folder, python, packages):
    assert run(folder, python, "-c", FOUND) == "True True"


def test_the_name_resolves(folder, python, packages):
    # On a CPU SGLang imports with the plug-in's help, which it asks for like this.
    platform = {} if Path("/dev/nvidia0").exists() else {"VERL_PLATFORM": "cpu"}
    assert run(folder, python, "-c", RESOLVED, **platform) == "MoebiusReplica MoebiusAdapter"


def test_sglang_loads_the_plug_in(folder, python, packages):
    assert run(folder, python, "-c", LOADED) == "moebius-rollout"
