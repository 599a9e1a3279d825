"""Every row fits the verl that is installed, and one that does not is refused by name."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from rollout.verl_plugin import table
from rollout.verl_plugin.cpu.table import CPU_ROWS
from rollout.verl_plugin.rows import ROWS, SUBCLASSED
from rollout.verl_plugin.table import Kind, Row, VerlChanged

ALL = (*ROWS, *CPU_ROWS, *SUBCLASSED)


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.target.removeprefix("verl."))
def test_every_row_fits_the_installed_verl(row):
    table.check([row])
    assert row.why and row.why[0].islower() and not row.why.endswith(".")


def test_a_target_stands_in_one_row():
    assert len({row.target for row in ALL}) == len(ALL)


@pytest.mark.parametrize(
    "target", ["verl.utils.config.validate", "verl.utils.settings.validate_config", "verl.nowhere.at_all.function"]
)
def test_a_missing_target_is_refused(target):
    bad = replace(next(row for row in ROWS if row.kind == Kind.WRAPS), target=target)
    with pytest.raises(VerlChanged, match=f"{target} in verl 0.9.1 does not exist"):
        table.check([bad])


def test_other_parameters_are_refused_before_anything_is_changed():
    registry: dict = {}
    good = Row("tests.verl.test_table.REGISTRY", Kind.ADDS, {"key": 1}, (), "a registry of this test")
    bad = Row("verl.utils.config.validate_config", Kind.WRAPS, print, ("settings",), "the config has another name")
    with pytest.raises(
        VerlChanged, match=r"validate_config in verl 0.9.1 takes \('config', .*expected \('settings',\)"
    ):
        table.apply([good, bad])
    assert registry == REGISTRY == {}


def test_what_is_no_dict_is_refused():
    with pytest.raises(VerlChanged, match=r"validate_config in verl 0\.9\.1 is a function, expected a dict"):
        table.check([Row("verl.utils.config.validate_config", Kind.ADDS, {}, (), "a registry")])


def test_a_verl_that_has_changed_is_told_at_import_and_raised_at_use():
    """In a process of its own, as verl loads the entry point."""
    program = "import verl; from verl.workers.rollout.replica import get_rollout_replica_class as get; get('moebius')"
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "tests.verl.changed", "VERL_PLATFORM": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert "moebius: the verl plug-in could not be loaded" in done.stderr.split("Traceback")[0]
    assert "verl.utils.config.validate_config in verl 0.9.1 takes ('settings',)" in done.stderr
    assert done.stderr.rstrip().endswith("RuntimeError: rollout.name=moebius: the plug-in could not be loaded")


REGISTRY: dict = {}
