"""The actor's own process, and the host that it is on, are lost: the caller gets Ray's error and nothing is left."""

import os
import signal
import time

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError

from rollout.actor import remote_actor
from tests.engine.inflight import GREEDY, prompts

REQUEST = {"prompts": prompts(4), "sampling": GREEDY | {"max_new_tokens": 400}, "timeout_s": 240}
ANSWER_S, GONE_S = 120.0, 30.0


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    ray.init(address=cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def gone(pids: list[int]) -> bool:
    deadline_s = time.monotonic() + GONE_S
    while any(map(psutil.pid_exists, pids)):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("lost", ["worker", "node"])
def test_the_caller_gets_an_error_and_the_ranks_are_gone(cluster, tiny_moe, lost):
    """On a machine of its own the actor's host would take the ranks with it; here the raylet is what is killed."""
    node = cluster.add_node(num_cpus=1, resources={"rollout": 1})
    actor = remote_actor(num_cpus=1, resources={"rollout": 1}).remote(
        tiny_moe, ranks=2, switch={"policy": "ep", "timeout_s": 120}, server_args={"max_total_tokens": 4096}
    )
    batch = actor.generate_batch.remote(**REQUEST)
    while (health := ray.get(actor.health.remote(), timeout=ANSWER_S))["inflight"] < 4:
        time.sleep(0.02)
    if lost == "worker":
        os.kill(ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=ANSWER_S), signal.SIGKILL)
    else:
        cluster.remove_node(node, allow_graceful=False)
    with pytest.raises(RayActorError):
        ray.get(batch, timeout=ANSWER_S)
    assert gone(health["pids"])
    if lost == "worker":
        cluster.remove_node(node)
