"""Every recipe with each of its models, composed on the configuration of the verl that is installed."""

import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from typer.testing import CliRunner

from moebius_engine.layout.shape import ModelShape, check_ranks
from moebius_engine.memory.presets import PRESETS
from recipes.recipe import _literal, load, load_model, names, overrides
from rollout.cli import app
from rollout.training import command, compose
from rollout.verl_plugin import settings

ALL = [(name, model) for name in names() for model in load(name).models]
DATA = Path("somewhere")


def composed(name, model=None, changes=()):
    config = compose(load_model(name, model)[1].trainer, overrides(name, DATA, model, changes))
    OmegaConf.resolve(config)
    return config


def test_there_are_three_recipes():
    assert ALL == [
        ("dapo_math", "qwen3_30b_a3b"),
        ("dapo_math", "qwen3_235b_a22b"),
        ("deepmath_grpo", "qwen3_30b_a3b"),
        ("deepmath_grpo", "qwen3_235b_a22b"),
        ("tiny_arithmetic", "tiny_cpu"),
    ]


@pytest.mark.parametrize(("name", "model"), ALL)
def test_recipe_composes_and_verl_and_the_plug_in_accept_it(name, model):
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = composed(name, model)
    found = settings.read(config.actor_rollout_ref.rollout)
    shape = PRESETS.get(config.actor_rollout_ref.model.path.removeprefix("Qwen/"))
    if shape:
        check_ranks(ModelShape.from_hf_config(shape), found.ranks)
    omega_conf_to_dataclass(config.algorithm)
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    # What the plug-in wraps, so that this needs no model on disk.
    validate = getattr(validate_config, "__wrapped__", validate_config)
    validate(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    assert config.trainer.use_v1
    assert config.trainer.experiment_name == f"{name}_{model}"
    assert Path(config.data.train_files) == DATA.absolute() / "train.parquet"
    # The longest sequence fits into one micro-batch of the GPUs that share it.
    actor, data = config.actor_rollout_ref.actor, config.data
    if actor.use_dynamic_bsz:
        tokens = actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size
        assert tokens >= data.max_prompt_length + data.max_response_length


@pytest.mark.parametrize(
    ("name", "model", "prompts", "samples", "lengths", "gpus"),
    [
        ("deepmath_grpo", "qwen3_30b_a3b", 512, 8, (2048, 8192), 8),
        ("deepmath_grpo", "qwen3_235b_a22b", 512, 16, (2048, 32768), 32),
        ("dapo_math", "qwen3_30b_a3b", 512, 16, (2048, 20480), 8),
        ("dapo_math", "qwen3_235b_a22b", 512, 16, (2048, 20480), 32),
        ("tiny_arithmetic", "tiny_cpu", 16, 4, (16, 240), 2),
    ],
)
def test_burst_of_a_step(name, model, prompts, samples, lengths, gpus):
    config = composed(name, model)
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.name, config.data.train_batch_size, rollout.n) == ("moebius", prompts, samples)
    assert (rollout.prompt_length, rollout.response_length) == lengths
    assert config.trainer.nnodes * config.trainer.n_gpus_per_node == gpus
    engines = gpus // settings.read(rollout).ranks
    assert rollout.max_num_seqs >= prompts * samples / engines  # all of them run at once


def test_dapo_has_dynamic_sampling_and_overlong_shaping():
    config = composed("dapo_math")
    assert config.algorithm.filter_groups.enable and config.algorithm.filter_groups.metric == "acc"
    assert config.reward.reward_manager.name == "dapo"
    assert config.reward.reward_kwargs.max_resp_len == config.data.max_response_length
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.loss_agg_mode) == (0.2, 0.28, "token-mean")


def test_a_change_replaces_a_key_with_or_without_its_plus():
    changes = ["data.train_batch_size=64", "reward.reward_kwargs.overlong_buffer_cfg.len=1024", "+trainer.mine=[1,2]"]
    arguments = overrides("dapo_math", DATA, changes=changes)
    assert sum("train_batch_size" in argument for argument in arguments) == 1
    config = compose("gpu", arguments)
    assert config.data.train_batch_size == 64
    assert config.reward.reward_kwargs.overlong_buffer_cfg.len == 1024
    assert config.trainer.mine == [1, 2]


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        # hydra reads backslashes before a quote its own way; no setting of verl has one.
        | st.text(alphabet=st.characters(exclude_characters="\\", codec="ascii", exclude_categories=["Cc"])),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=4,
    )
)
def test_a_value_reaches_hydra_as_it_is_in_the_file(value):
    (parsed,) = OverridesParser.create().parse_overrides([f"key={_literal(value)}"])
    found = parsed.value()
    assert found == value and type(found) is type(value)


def test_a_mapping_is_no_value():
    with pytest.raises(TypeError, match=r"an override is a scalar or a list of them, got \{'a': 1\}"):
        _literal({"a": 1})


def test_verl_reads_the_command_as_compose_does(monkeypatch, capsys):
    from verl.trainer import main_ppo

    arguments = overrides("dapo_math", DATA)
    python, _, module, *rest = command("gpu", arguments)
    assert (python, module, rest) == (sys.executable, main_ppo.__name__, arguments)
    monkeypatch.setattr(sys, "argv", [module, *rest, "--cfg", "job"])
    main_ppo.main()
    assert OmegaConf.create(capsys.readouterr().out) == compose("gpu", arguments)


def test_the_trainer_on_a_cpu_reads_the_command_as_compose_does():
    from rollout.verl_plugin.cpu import train

    arguments = overrides("tiny_arithmetic", DATA)
    assert command("cpu", arguments)[2] == train.__name__
    assert train.compose(arguments) == compose("cpu", arguments)


def invoke(*arguments):
    return CliRunner().invoke(app, ["recipe", *arguments])


def test_print_shows_what_verl_gets(tmp_path):
    result = invoke("deepmath_grpo", "--print", "--data", str(tmp_path), "--set", "data.train_batch_size=8")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == overrides("deepmath_grpo", tmp_path, changes=["data.train_batch_size=8"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "--print"], "there is no recipe 'nothing'; there are dapo_math, deepmath_grpo, tiny_arithmetic"),
        (["../recipes", "--print"], "there is no recipe '../recipes'"),
        (["dapo_math", "--print", "--model", "gpt"], "has no model 'gpt'; it has qwen3_30b_a3b, qwen3_235b_a22b"),
        (["dapo_math", "--print", "--set", "data.nope=1"], "Key 'nope' is not in struct"),
        (["dapo_math", "--print", "--set", "data.train_batch_size"], "a change is key=value, got"),
        (["dapo_math", "--print", "--set", "data.train_batch_size=["], "no viable alternative at input '['"),
        (["dapo_math", "--run", "--sample"], "--sample says what to prepare: give --prepare too"),
        (["dapo_math"], "nothing to do: give --print, --prepare or --run"),
        (["dapo_math", "--prepare", "--sample", "--data", __file__], "data must be a folder"),
    ],
)
def test_a_bad_argument_is_one_line_and_exit_code_2(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert message in result.stderr


def test_run_needs_prepared_data(tmp_path):
    result = invoke("tiny_arithmetic", "--run", "--data", str(tmp_path / "data"))
    assert result.exit_code == 2
    assert "train.parquet is not there: run this recipe with --prepare first" in result.stderr


@pytest.mark.parametrize(
    ("name", "module"), [("dapo_math", "verl.trainer.main_ppo"), ("tiny_arithmetic", "rollout.verl_plugin.cpu.train")]
)
def test_run_hands_the_arguments_to_the_trainer_and_its_exit_code_back(monkeypatch, tmp_path, name, module):
    commands = []

    def run(command):
        commands.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr("rollout.recipe_cli.subprocess.run", run)
    assert invoke(name, "--prepare", "--sample", "--data", str(tmp_path)).exit_code == 0
    assert invoke(name, "--run", "--data", str(tmp_path)).exit_code == 3
    assert commands == [[sys.executable, "-m", module, *overrides(name, tmp_path)]]
