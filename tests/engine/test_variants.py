"""The same comparison where KV heads are fewer than ranks, without prefix cache and without overlap scheduling."""

import pytest

from moebius_engine.config import SwitchConfig
from tests.engine.budgets import cpu_sizes, disagreements
from tests.engine.inflight import GREEDY, logprob_difference, prompts, switched_run

THERE_AND_BACK = ["tp", "ep", "tp", "ep"]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Start an engine on a model of one KV head; all are stopped at the end of the module."""
    from moebius_engine.engine import SwitchingEngine
    from recipes.tiny_moe import make_tiny_moe

    engines = []

    def start(ranks: int, **arguments):
        path = make_tiny_moe(tmp_path_factory.mktemp("models") / "one-head", kv_heads=1)
        switch = SwitchConfig(policy="ep", check_bytes=True, timeout_s=200, silent_s=60)
        engines.append(SwitchingEngine(str(path), ranks=ranks, switch=switch, max_running_requests=64, **arguments))
        return engines[-1]

    yield start
    for engine in engines:
        engine.shutdown()


def compare(engine) -> None:
    request = {"input_ids": prompts(10, length=24), "sampling_params": GREEDY, "return_logprob": True}
    expected = engine.generate(**request)
    run = switched_run(engine, THERE_AND_BACK, **request)
    assert [record.refused for record in run.records] == [None] * 4
    assert run.tokens == [answer["output_ids"] for answer in expected]
    assert logprob_difference(run.answers, expected) < 1e-4


def test_one_kv_head_on_two_ranks_without_prefix_cache_and_overlap(start):
    engine = start(2, disable_radix_cache=True, disable_overlap_schedule=True)
    compare(engine)
    assert disagreements(cpu_sizes(engine, requests=32, overlap=False), engine.memory()[0]) == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_kv_head_on_four_ranks(start):
    """Each head lies on four ranks in TP; each of them sends a quarter of the tokens back."""
    compare(start(4))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_tokens_than_tp_holds_are_refused(start):
    """With one KV head on two ranks TP holds half of what the EP ranks hold together: a switch that does not fit is
    refused with the numbers, and the requests go on in EP."""
    engine = start(2, max_total_tokens=512, disable_radix_cache=True)
    request = {"input_ids": prompts(10, length=60), "sampling_params": GREEDY | {"max_new_tokens": 30}}
    expected = engine.generate(**request)
    run = switched_run(engine, ["tp"], **request)
    assert "do not fit into tp" in run.records[0].refused and "512 rows a rank" in run.records[0].refused
    assert run.tokens == [answer["output_ids"] for answer in expected]
