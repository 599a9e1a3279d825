"""Settings that a moebius rollout cannot honour are refused by name, before Ray starts."""

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf, open_dict
from verl.utils.config import omega_conf_to_dataclass

from moebius_engine.config import SwitchConfig
from rollout.verl_plugin import check, settings
from rollout.verl_plugin.cpu.train import compose

KWARGS = "+actor_rollout_ref.rollout.engine_kwargs."


def config(tiny_moe, *overrides):
    return compose([f"actor_rollout_ref.model.path={tiny_moe}", *overrides])


def read(tiny_moe, *overrides):
    return settings.read(config(tiny_moe, *overrides).actor_rollout_ref.rollout)


def test_defaults(tiny_moe):
    found = read(tiny_moe)
    assert found == settings.Settings(ranks=2, switch=SwitchConfig(), server_args={}, dump_dir=None)


def test_policy_and_server_arguments(tiny_moe):
    found = read(tiny_moe, KWARGS + "moebius={ranks:2,threshold:8,policy:interactive}", KWARGS + "sglang.page_size=4")
    assert found.switch == SwitchConfig(policy="interactive", threshold=8)
    assert found.server_args == {"page_size": 4}


def test_where_requests_are_written(tiny_moe):
    assert read(tiny_moe, KWARGS + "moebius.dump_dir=runs/requests").dump_dir == Path("runs/requests")


def test_verls_dataclass_reads_the_same(tiny_moe):
    rollout = config(tiny_moe, KWARGS + "moebius.threshold=8").actor_rollout_ref.rollout
    assert settings.read(omega_conf_to_dataclass(rollout)) == settings.read(rollout)


REFUSED = {
    KWARGS + "moebius.treshold=8": r"unknown \['treshold'\]; known are \['ranks', 'dump_dir', 'policy', .*'threshold'",
    KWARGS + "moebius.threshold=0": "threshold=0: at least 1",
    KWARGS + "moebius.policy=off": "policy='off' is stock SGLang: use rollout.name=sglang",
    KWARGS + "moebius.ranks=4": r"ranks=4, but verl gives a replica .* 1 \* 2 = 2 GPUs",
    KWARGS + "sglang.tp_size=2": "tp_size=2: a switching engine sets it",
    KWARGS + "sglang.enable_memory_saver=True": "enable_memory_saver=True",
    KWARGS + "sglang.api_key=hush": "api_key belongs to an HTTP server, and this engine has none",
    "actor_rollout_ref.rollout.pipeline_model_parallel_size=2": "pipeline_model_parallel_size=2: only 1 works",
    "actor_rollout_ref.rollout.expert_parallel_size=4": "expert_parallel_size=4: .* all 2 ranks",
    "actor_rollout_ref.rollout.disaggregation.enabled=True": "disaggregation.enabled=True: only False works",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=True": "enable_rollout_routing_replay=True: only False",
    "actor_rollout_ref.rollout.quantization=fp8": "quantization='fp8': only None works",
    "actor_rollout_ref.rollout.prometheus.enable=True": "prometheus.enable=True: only False works",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded": "wire format delta_flush",
    "actor_rollout_ref.rollout.n_gpus_per_node=1": "2 ranks need one host, and rollout.n_gpus_per_node=1",
    "actor_rollout_ref.model.lora_rank=8": "LoRA of rank 8",
    "trainer.use_v1=False": "trainer.use_v1=False",
    "actor_rollout_ref.rollout.data_parallel_size=3 actor_rollout_ref.rollout.expert_parallel_size=3 "
    "actor_rollout_ref.rollout.n_gpus_per_node=3": "ranks=3 does not divide experts=8",
}


@pytest.mark.parametrize("overrides", REFUSED, ids=lambda overrides: overrides.split(".")[-1])
def test_refused_before_ray_starts(tiny_moe, overrides):
    from verl.trainer.main_ppo import validate_config

    with pytest.raises(ValueError, match=REFUSED[overrides]):
        validate_config(config(tiny_moe, *overrides.split()), use_reference_policy=False, use_critic=False)


def test_tied_embeddings_are_refused_before_ray_starts(tiny_moe, tmp_path):
    found = json.loads((Path(tiny_moe) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(found | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match="tie_word_embeddings=True"):
        check.check(config(str(tmp_path)))


@pytest.mark.parametrize(("kv_heads", "told"), [(1, "1 KV heads 2 times in TP, so TP has room for 1/2 of"), (2, "")])
def test_that_tp_has_less_room_is_said_before_ray_starts(tiny_moe, tmp_path, capsys, kv_heads, told):
    found = json.loads((Path(tiny_moe) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(found | {"num_key_value_heads": kv_heads}))
    check.check(config(str(tmp_path)))
    said = capsys.readouterr().out
    assert told in said and bool(told) == ("KV heads" in said)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data.train_batch_size=64", "actor_rollout_ref.rollout.n=4"], ""),
        (["data.train_batch_size=64", "actor_rollout_ref.rollout.n=5"], "320 requests on each replica.*lets 256 run"),
        (["data.train_batch_size=64", "actor_rollout_ref.rollout.n=5", "trainer.nnodes=2"], ""),
        (["data.train_batch_size=64", "actor_rollout_ref.rollout.max_num_seqs=63"], "set .*max_num_seqs=64"),
        (["data.train_batch_size=64", KWARGS + "sglang.max_running_requests=8"], "lets 8 run at once"),
    ],
)
def test_that_the_burst_is_cut_off_is_said_before_ray_starts(tiny_moe, capsys, overrides, told):
    check.check(config(tiny_moe, *overrides))
    said = capsys.readouterr().out
    assert re.search(told, said) and bool(told) == ("burst" in said)


def test_other_rollouts_are_left_alone(tiny_moe):
    one = config(tiny_moe, "actor_rollout_ref.rollout.name=sglang")
    before = OmegaConf.to_container(one)
    check.validate_config(lambda config, **_: None, one, use_reference_policy=False, use_critic=False)
    assert OmegaConf.to_container(one) == before


def test_the_users_own_sampler_stays(tiny_moe, capsys):
    one = config(tiny_moe)
    with open_dict(one):
        one.trainer.v1.sampler.custom_sampler = {"path": "mine.py", "name": "Mine"}
    check.bring_sampler(one)
    assert one.trainer.v1.sampler.custom_sampler.name == "Mine" and "yours" in capsys.readouterr().out
