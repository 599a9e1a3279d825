"""The sampler that the plug-in names is verl's own but for the metrics."""

import asyncio
from types import SimpleNamespace

import pytest
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from rollout.verl_plugin import check, sampler
from rollout.verl_plugin.cpu.train import compose
from rollout.verl_plugin.rows import load_replica
from tests.verl.test_metrics import report

FILTER = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_inflight_gen_batches=3")


def built(config):
    """What verl builds for this configuration."""
    trainer = SimpleNamespace(
        config=config, trainer_mode=config.trainer.v1.trainer_mode, _add_prompts_to_generate=print
    )
    trainer._resolve_filter_groups_metric = lambda: PPOTrainer._resolve_filter_groups_metric(trainer)
    return PPOTrainer._build_replay_buffer(trainer)


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
@pytest.mark.parametrize("overrides", [(), FILTER, ("trainer.v1.sampler.sync_refill_failed_groups=True",)])
def test_the_sampler_is_set_up_as_verls_own(mode, overrides):
    config = compose([f"trainer.v1.trainer_mode={mode}", "data.train_batch_size=16", *overrides])
    own = built(config)
    check.bring_sampler(config)
    ours = built(config)
    assert isinstance(ours, type(own)) and type(ours) is not type(own)
    ignored = {"sampler_kwargs"}
    assert {k: v for k, v in vars(ours).items() if k not in ignored} == {
        k: v for k, v in vars(own).items() if k not in ignored
    }


def test_no_server_no_metrics(monkeypatch):
    monkeypatch.setattr(sampler, "servers", {})
    assert sampler.step_metrics(1) == {}


async def test_replicas_are_numbered_by_their_rank_whichever_started_first(monkeypatch):
    load_replica()  # verl's SGLang modules do not import before
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

    from rollout.verl_plugin import replica

    started: dict = {}
    monkeypatch.setattr(replica, "servers", started)
    monkeypatch.setattr(sampler, "servers", started)

    async def launch(self):
        await asyncio.sleep(0.01 * (3 - self.replica_rank))
        reports = [report(4.0 + self.replica_rank)], []
        self._server_handle = SimpleNamespace(take_reports=SimpleNamespace(remote=lambda: reports))

    monkeypatch.setattr(SGLangReplica, "launch_servers", launch)
    monkeypatch.setattr(sampler.ray, "get", lambda calls, timeout: calls)
    replicas = [object.__new__(replica.MoebiusReplica) for _ in range(3)]
    for rank, one in enumerate(replicas):
        one.replica_rank = rank
    await asyncio.gather(*(one.launch_servers() for one in replicas))
    metrics = sampler.step_metrics(1)
    assert [metrics[f"moebius/replica_{rank}/step_s"] for rank in range(3)] == [4.0, 5.0, 6.0]


@pytest.mark.parametrize(
    ("mode", "partition", "asked"),
    [
        ("sync", "train", [("end_step", {"keep": True}), ("take_reports", {})]),
        ("sync", "val", [("end_step", {"keep": False})]),
        ("colocate_async", "train", [("take_reports", {})]),
        ("colocate_async", "val", []),
    ],
)
def test_what_the_servers_are_asked_after_a_batch(monkeypatch, mode, partition, asked):
    config = compose([f"trainer.v1.trainer_mode={mode}"])
    check.bring_sampler(config)
    buffer = built(config)
    calls: list = []
    monkeypatch.setattr(sampler, "_ask", lambda method, **arguments: calls.append((method, arguments)) or [])
    monkeypatch.setattr(type(buffer).__mro__[1], "sample", lambda self, **_: ("batch", {"theirs": 1}))
    assert buffer.sample(global_steps=1, partition_id=partition, batch_size=4) == ("batch", {"theirs": 1})
    assert calls == asked
