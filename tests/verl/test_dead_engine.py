"""An engine that dies or stops under verl's server: the trainer, which waits for Ray calls, gets an error in time."""

import os
import signal
import time

import pytest
import ray
from verl.workers.rollout.replica import RolloutMode

from rollout.verl_plugin.cpu.train import compose
from rollout.verl_plugin.server import MoebiusServer
from tests.verl.loop import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
START_S, ERROR_S = 200, 20


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture
def server(cluster, tmp_path):
    config = compose(
        [
            f"actor_rollout_ref.model.path={make_model(tmp_path)}",
            "actor_rollout_ref.rollout.max_num_seqs=8",
            "actor_rollout_ref.rollout.response_length=400",
            "+actor_rollout_ref.rollout.engine_kwargs.moebius={threshold:4,timeout_s:120}",
        ]
    ).actor_rollout_ref
    server = ray.remote(MoebiusServer).remote(config.rollout, config.model, RolloutMode.HYBRID, [], 0, 0, 1, "", 0)
    ray.get(server.launch_server.remote(), timeout=START_S)
    yield server
    ray.kill(server)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_every_call_of_the_trainer_ends_with_an_error(server, how):
    def generate(row):
        return server.generate.remote([1, 2, 3 + row], {"temperature": 1.0, "ignore_eos": True}, f"{how}-{row}")

    pids = ray.get(server.__ray_call__.remote(lambda self: [vital.pid for vital in self.engine.vitals]), timeout=60)
    running = [generate(row) for row in range(8)]
    ready, _ = ray.wait(running, timeout=2)
    assert not ready
    began = time.monotonic()
    os.kill(pids[1], how)
    for call in running:
        with pytest.raises(
            RuntimeError, match=r"the engine is dead: rank 1 \(pid \d+\) (was ended by|has shown no sign)"
        ):
            ray.get(call, timeout=ERROR_S)
    print(f"\n{how.name}: the trainer's calls failed after {time.monotonic() - began:.1f} s")
    for call in (
        generate(9), server.abort_all_requests.remote(), server.resume_generation.remote(),
        server.clear_kv_cache.remote(), server.sleep.remote(), server.release_kv_cache.remote(),
        server.update_bucket.remote(None), server.finish_update.remote(1.0, 1, 1), server.fail_update.remote(),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="the engine is dead: rank 1"):
            ray.get(call, timeout=ERROR_S)
