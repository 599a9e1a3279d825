"""A model that is not there, or is none: one line that names it, from every command that takes one."""

import json

import pytest
from typer.testing import CliRunner

from moebius_engine.checkpoint import read_hf_config
from rollout.cli import app
from tests.unit.test_replay import file_of, line


@pytest.mark.parametrize("command", ["calibrate", "replay", "serve", "verify"])
def test_a_model_that_is_not_there(tmp_path, command):
    model = str(tmp_path / "none")
    files = [str(file_of(tmp_path, line()))] if command == "replay" else []
    result = CliRunner().invoke(app, [command, *files, "--model", model])
    assert result.exit_code == 2, result.exception
    printed = [text for text in result.stderr.splitlines() if "Error" in text]
    assert len(printed) == 1 and printed[0].startswith(f"Error: model={model!r} is no folder here"), result.stderr


@pytest.mark.parametrize("config", [None, "[]", "{", '{"model_type": "qwen9_moe"}'])
def test_a_folder_that_holds_no_model(tmp_path, config):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=f"model='{tmp_path}' is no checkpoint: .*; give a checkpoint's folder"):
        read_hf_config(str(tmp_path), {})


def test_a_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "hidden_size": 64}))
    assert read_hf_config(str(tmp_path), {})["hidden_size"] == 64
