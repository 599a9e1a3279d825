"""The whole engine on a GPU: both graph sets stay valid over many switches and over a sleep, and nothing is allocated.

Two ranks, on a GPU each or sharing one (which needs MPS), in float32, so that the tokens of switched and unswitched
runs can be compared.
"""

import asyncio
import os

import pytest
import torch
from safetensors.torch import load_file

from moebius_engine.config import SwitchConfig
from moebius_engine.memory.budget import Sizes, requests_per_rank
from tests.engine.budgets import disagreements, wrong
from tests.engine.inflight import GREEDY, logprob_difference, prompts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

SWITCHES, STREAMS, TOKENS = 100, 6, 1 << 20
REQUEST = {"input_ids": prompts(STREAMS), "sampling_params": GREEDY | {"max_new_tokens": 200}, "return_logprob": True}
SHARE_GPU = torch.cuda.device_count() == 1


def free_bytes() -> int:
    """On the ranks' GPUs."""
    return sum(torch.cuda.mem_get_info(gpu)[0] for gpu in range(1 if SHARE_GPU else 2))


@pytest.fixture(scope="module")
def engine(tiny_moe):
    from moebius_engine.engine import SwitchingEngine
    from tests.engine.faults import faulty_schedulers

    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    with faulty_schedulers():
        made = SwitchingEngine(
            tiny_moe,
            ranks=2,
            switch=SwitchConfig(policy="ep", share_gpu=SHARE_GPU, transfer="direct", timeout_s=120),
            dtype="float32",
            skip_tokenizer_init=True,
            attention_backend="triton",
            sampling_backend="pytorch",
            grammar_backend="none",
            disable_custom_all_reduce=SHARE_GPU,
            cuda_graph_bs=[STREAMS // 2, STREAMS],
            max_running_requests=16,
            max_total_tokens=TOKENS,
            mem_fraction_static=0.5,
        )
    yield made
    made.shutdown()


def test_every_component_is_as_the_budget_says(engine):
    """Graphs apart: their budget is the paper's figure for another model."""
    requests = requests_per_rank(16, TOKENS, 4096, 2)
    sizes = Sizes(engine.shape, 2, TOKENS, requests, 4096, 4096, itemsize=4, kv_itemsize=4)

    def differing(sizes: Sizes, measured: dict[str, int]) -> set[str]:
        found = disagreements(sizes, measured)
        return {f"{key}: {pair}" for key, pair in found.items() if -1 not in pair and not key.startswith("CUDA graphs")}

    for measured in engine.memory():
        assert differing(sizes, measured) == set()
        assert differing(wrong(sizes, experts=16), measured)


def allocations(engine) -> list[int]:
    return [rank["count"] for rank in engine._run(engine._command("device_allocations"))]


def test_a_hundred_switches(engine):
    expected = engine.generate(**REQUEST)

    async def switching(switches: int) -> tuple[list[dict], list]:
        """Batches one after the other until all switches are done, each of them with requests in flight."""
        records, answers = [], []
        while len(records) < switches:
            batch = asyncio.ensure_future(engine.async_generate(**REQUEST))
            await asyncio.sleep(0.05)
            while not batch.done() and len(records) < switches:
                record = await engine.async_switch("tp" if len(records) % 2 == 0 else "ep")
                records.append(record)
                await asyncio.sleep(0.02)
            answers.append(await batch)
        return answers, records

    engine._run(switching(10))  # what is allocated at first use is allocated now,
    engine.switch("tp")
    engine.generate(**REQUEST)  # and what SGLang itself needs when requests end, in this layout too
    engine.switch("ep")
    addresses, before = engine.addresses(), allocations(engine)
    answers, records = engine._run(switching(SWITCHES))
    assert all(record.refused is None for record in records)
    assert sum(record.running > 0 for record in records) >= SWITCHES * 9 // 10
    for batch in answers:
        assert [answer["output_ids"] for answer in batch] == [answer["output_ids"] for answer in expected]
        assert logprob_difference(batch, expected) < 1e-3
    assert engine.addresses() == addresses
    assert allocations(engine) == before


def test_memory_comes_and_goes_and_graphs_stay_valid(engine, tiny_moe):
    expected = engine.generate(**REQUEST)
    addresses, free = engine.addresses(), free_bytes()
    arena = sum(rank[key] for rank in engine.memory() for key in ("experts.both", "KV cache.both", "spare KV slot.tp"))
    engine.release_memory_occupation()
    assert free_bytes() - free > arena * 0.98
    engine.resume_memory_occupation(["weights"])
    engine.update_weights(load_file(f"{tiny_moe}/model.safetensors").items())
    engine.resume_memory_occupation(["kv_cache"])
    for layout in ("tp", "ep"):
        engine.switch(layout)
        answers = engine.generate(**REQUEST)
        assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in expected]
    assert engine.addresses() == addresses
    assert abs(free_bytes() - free) < 1 << 28


def test_weights_come_from_a_trainer_s_gpu_memory(engine, tiny_moe):
    """Each rank maps this process's tensors, as it does a trainer's on the same GPU."""
    expected = [answer["output_ids"] for answer in engine.generate(**REQUEST)]
    weights = {name: tensor.cuda() for name, tensor in load_file(f"{tiny_moe}/model.safetensors").items()}
    for sign, as_before in ((-1, False), (1, True)):
        engine.update_weights((name, sign * tensor) for name, tensor in weights.items())
        for layout in ("tp", "ep"):
            engine.switch(layout)
            answers = [answer["output_ids"] for answer in engine.generate(**REQUEST)]
            assert (answers == expected) == as_before


def test_without_room_memory_stays_released_until_there_is_some(engine, tiny_moe):
    expected = engine.generate(**REQUEST)
    engine.release_memory_occupation()
    taken = torch.empty(torch.cuda.mem_get_info()[0] - (1 << 28), dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match=r"no memory for .* CUDA_ERROR_OUT_OF_MEMORY.*: free some"):
        engine.resume_memory_occupation()
    assert "released" in engine.health()["released"]
    del taken
    torch.cuda.empty_cache()
    engine.resume_memory_occupation()
    engine.update_weights(load_file(f"{tiny_moe}/model.safetensors").items())
    answers = engine.generate(**REQUEST)
    assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in expected]
