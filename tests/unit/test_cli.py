"""The command line: bad arguments, the end of verify, and what its help imports."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rollout.cli import app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--ranks", "3"], "ranks must be 2 or 4: the demo's model has 8 experts and 4 heads; got 3"),
        (["demo", "--problems", "65"], "problems must be between 1 and the sample's 64, got 65"),
        (["demo", "--problems", "3"], "must be at least 16 requests"),
        (["demo", "--out", __file__], "out must be a folder"),
        (["verify", "--switches", "0"], "switches must be at least 1, got 0"),
        (["verify", "--dtype", "float8"], "dtype='float8' is unknown; use one of ['float32', 'bfloat16']"),
        (["verify", "--ranks", "1"], "ranks must be at least 2, got 1"),
        (["verify", "--set", "page_size"], "--set 'page_size': give argument=value"),
    ],
)
def test_bad_arguments_exit_2_with_one_line(arguments, message):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: ") and message in line


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_verify_ends_with_its_json_and_code(monkeypatch, ok, code):
    calls = []

    def run(**arguments):
        calls.append(arguments)
        return {"switches": 4, "ok": ok}

    monkeypatch.setitem(sys.modules, "rollout.verify", SimpleNamespace(run=run))
    result = CliRunner().invoke(app, ["verify", "--switches", "4", "--ranks", "2", "--set", "page_size=16"])
    asked = {"switches": 4, "ranks": 2, "dtype": "float32", "share_gpu": False, "model": None}
    asked["server_args"] = {"page_size": 16}
    assert (result.exit_code, calls) == (code, [asked])
    assert json.loads(result.stdout.splitlines()[-1]) == {"switches": 4, "ok": ok}


@pytest.mark.parametrize(
    ("module", "made_for", "arguments"),
    [("rollout.demo", "run_demo", ["demo"]), ("rollout.soak.start", "soak", ["soak", "--minutes", "1"])],
)
def test_what_is_made_for_a_cpu_sees_no_gpu(monkeypatch, module, made_for, arguments):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    seen = []

    def run(*_):
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        return SimpleNamespace(ok=True, as_json=dict)

    monkeypatch.setitem(sys.modules, module, SimpleNamespace(DemoSettings=dict, **{made_for: run}))
    CliRunner().invoke(app, arguments)
    assert seen == [""]


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from typer.testing import CliRunner; from rollout.cli import app; "
        "assert CliRunner().invoke(app, ['demo', '--help']).exit_code == 0; "
        "print([name for name in ('torch', 'sglang', 'ray', 'transformers', 'datasets') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
