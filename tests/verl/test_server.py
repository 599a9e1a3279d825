"""verl's server with a real engine inside, and verl's calls of it without the rest of verl."""

import asyncio
from dataclasses import replace

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.utils import MultiprocessingSerializer
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from rollout.replay.workload import read_workloads
from rollout.verl_plugin.adapter import ServerCalls
from rollout.verl_plugin.cpu.train import compose
from rollout.verl_plugin.server import MoebiusServer
from tests.engine.inflight import stopped_schedulers, until
from tests.verl.loop import make_model

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def dump_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("requests")


@pytest.fixture(scope="module")
def config(model, dump_dir):
    kwargs = f"+actor_rollout_ref.rollout.engine_kwargs.moebius={{threshold:10,timeout_s:60,dump_dir:{dump_dir}}}"
    return compose(
        [
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.rollout.max_num_seqs=8",
            "actor_rollout_ref.rollout.response_length=24",
            kwargs,
        ]
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(config):
    actor = config.actor_rollout_ref
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # verl sets it in the server's process, which here is the tests'
        server = MoebiusServer(actor.rollout, actor.model, RolloutMode.HYBRID, [], 0, 0, 1, "", 0)
        await server.launch_server()
        yield server
        server.engine.shutdown()


@pytest.fixture(scope="module")
def buckets(model):
    """A full set of weights in three parts."""
    pairs = list(load_file(model / "model.safetensors").items())
    return [pairs[start::3] for start in range(3)]


@pytest_asyncio.fixture(loop_scope="module")
async def server(started, buckets):
    """The server, idle, after the update of step 4."""
    await update(started, buckets)
    await started.set_global_steps(4)
    started.steps.take()
    return started


def request_of(bucket) -> UpdateWeightsFromTensorReqInput:
    return UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[MultiprocessingSerializer.serialize(bucket) for _ in range(2)]
    )


async def update(server, buckets) -> None:
    for bucket in buckets:
        await server.update_bucket(request_of(bucket))
    await server.finish_update(seconds=0.5, tensors=sum(map(len, buckets)), size=100)


async def generate(server, row: int = 0, **sampling) -> TokenOutput:
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True} | sampling
    return await server.generate([1, 2, 3 + row], sampling, f"{row}-{id(sampling)}")


async def test_a_step_begins_in_ep_switches_and_is_reported_once(server):
    outputs = await asyncio.gather(*(generate(server, row) for row in range(16)))
    assert all(len(output.log_probs) == len(output.token_ids) > 0 for output in outputs)
    assert all(output.extra_fields == {"global_steps": 4} for output in outputs)
    assert {output.stop_reason for output in outputs} <= {"length", "stop"}
    await server.end_step()
    ((report,), updates) = await server.take_reports()
    assert (report.step, report.responses, report.switches, report.layout_at_end) == (5, 16, 1, "tp")
    assert 0 < report.inflight_at_switch < 10 and report.longest_response == 24
    assert report.switch_records[0].source == "ep"
    assert updates == []


async def test_a_steps_requests_are_written_for_replay(server, dump_dir):
    outputs = await asyncio.gather(*(generate(server, row) for row in range(4)))
    await server.end_step()
    (step,) = read_workloads(dump_dir / "replica_0" / "step_5.jsonl", vocab_size=512)
    assert step.prompts == [[1, 2, 3 + row] for row in range(4)]
    assert step.lengths == [len(output.token_ids) for output in outputs]


async def test_an_update_ends_the_step_and_the_next_begins_in_ep(server, buckets):
    await asyncio.gather(*(generate(server, row) for row in range(16)))
    assert (await server.engine.async_health())["layout"] == "tp"
    await update(server, buckets)
    ((report,), (record,)) = await server.take_reports()
    assert report.layout_at_end == "tp" and record.seconds == 0.5 and record.bytes == 100
    await generate(server)
    await server.end_step()
    ((report,), _) = await server.take_reports()
    assert report.layout_at_end == "ep" and report.switches == 0


async def test_an_update_waits_for_the_requests_in_flight(server, buckets):
    running = [asyncio.create_task(generate(server, row, max_tokens=40, ignore_eos=True)) for row in range(8)]
    await until(server.engine, lambda health: health["inflight"] == 8)
    await update(server, buckets)
    await server.set_global_steps(5)
    assert all(task.done() for task in running)
    assert {(task.result().stop_reason, len(task.result().token_ids)) for task in running} == {("length", 40)}
    assert {task.result().extra_fields["global_steps"] for task in running} == {4}
    assert (await generate(server)).extra_fields["global_steps"] == 5


async def test_an_unfinished_update_is_refused_and_a_full_one_heals(server, buckets):
    await server.update_bucket(request_of(buckets[0]))
    with pytest.raises(RuntimeError, match=r"the weights are incomplete: .* have not arrived"):
        await generate(server)
    with pytest.raises(RuntimeError, match="the weights are incomplete"):
        await server.finish_update(seconds=1, tensors=1, size=1)
    await update(server, buckets)
    assert (await generate(server)).stop_reason in ("length", "stop")


class Handle:
    """A Ray handle's calls, of an object in this process."""

    def __init__(self, server):
        self._server = server

    def __getattr__(self, name):
        return type("Method", (), {"remote": staticmethod(getattr(self._server, name))})


async def test_a_refused_bucket_fails_the_update_after_its_last_bucket(server, buckets):
    calls = ServerCalls(Handle(server))
    await calls.update_weights_from_tensor(request_of([("model.no_such.weight", torch.zeros(1))]))
    for bucket in buckets:
        await calls.update_weights_from_tensor(request_of(bucket))  # not sent: the set has failed
    await calls.flush_cache()
    with pytest.raises(ValueError, match=r"unknown tensor 'model\.no_such\.weight'"):
        await calls.raise_refusal()
    with pytest.raises(RuntimeError, match="the weights are incomplete"):
        await generate(server)
    for bucket in buckets:
        await calls.update_weights_from_tensor(request_of(bucket))
    await calls.flush_cache()
    await calls.raise_refusal()
    assert (await generate(server)).stop_reason in ("length", "stop")


async def test_aborted_requests_keep_their_tokens_and_end_the_step(server):
    running = [asyncio.create_task(generate(server, row, max_tokens=400, ignore_eos=True)) for row in range(8)]
    while (await server.engine.async_health())["inflight"] < 8:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    await server.abort_all_requests()
    outputs = await asyncio.gather(*running)
    assert {output.stop_reason for output in outputs} == {"abort"}
    assert all(0 < len(output.token_ids) == len(output.log_probs) < 400 for output in outputs)
    ((report,), _) = await server.take_reports()
    assert report.responses == 8
    late = asyncio.create_task(generate(server))
    await asyncio.sleep(0.5)
    assert not late.done() and server.steps.take() == ([], [])
    await server.resume_generation()
    assert (await asyncio.wait_for(late, 60)).stop_reason in ("length", "stop")


async def test_an_abort_while_a_step_begins_neither_hangs_nor_loses_a_request(server):
    running = [asyncio.create_task(generate(server, row, max_tokens=400, ignore_eos=True)) for row in range(4)]
    await asyncio.sleep(0)  # the first one begins the step, which the ranks have to answer; the others wait for it
    abort = asyncio.create_task(server.abort_all_requests())
    await asyncio.sleep(0)
    late = asyncio.create_task(generate(server, 4, max_tokens=8))
    await asyncio.wait_for(abort, 30)
    outputs = await asyncio.gather(*running)
    assert {(output.stop_reason, output.extra_fields["global_steps"]) for output in outputs} == {("abort", 4)}
    assert not late.done()
    await server.set_global_steps(5)
    await server.resume_generation()
    assert (await asyncio.wait_for(late, 60)).extra_fields["global_steps"] == 5


class Client(FullyAsyncLLMServerClient):
    """verl's client of its asynchronous modes, which asks again for what was aborted, with one server."""

    def __init__(self, config, server):
        super().__init__(config)
        self._server = server

    async def _acquire_server(self, request_id, **_):
        return "server", Handle(self._server)

    def _release_server(self, server_id, request_id=None):
        pass


@pytest.mark.parametrize("layout", ["ep", "tp"])
async def test_a_partial_rollout_goes_on_with_its_tokens_and_has_both_versions(server, config, buckets, layout):
    """Aborted in either layout, updated (with the same weights, so that the tokens can be compared) and resumed."""

    def start() -> list[asyncio.Task]:
        client = Client(config, server)
        greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": 64, "logprobs": True}
        return [
            asyncio.create_task(client.generate(f"{row}", prompt_ids=[1, 2, 3 + row], sampling_params=greedy))
            for row in range(6)
        ]

    expected = await asyncio.gather(*start())
    await server.end_step()
    running = start()
    await until(server.engine, lambda health: health["inflight"] == 6)
    if layout == "tp":
        assert (await server.engine.async_switch("tp")).inflight == 6
    await server.abort_all_requests()
    await update(server, buckets)
    await server.set_global_steps(6)
    await server.resume_generation()
    outputs = await asyncio.gather(*running)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert {(output.stop_reason, len(output.token_ids), len(output.log_probs)) for output in outputs} == {
        ("length", 64, 64)
    }
    versions = [(out.extra_fields["min_global_steps"], out.extra_fields["max_global_steps"]) for out in outputs]
    assert set(versions) == {(4, 6)}


async def test_bad_requests_raise_and_the_engine_goes_on(server):
    sampling = {"temperature": 1.0, "logprobs": True}
    for prompt, message in (([], "input_ids is empty"), ([1] * 600, "exceeds rollout.max_model_len=512")):
        with pytest.raises(ValueError, match=message):
            await server.generate(prompt, sampling, "bad")
    with pytest.raises(ValueError, match="images and video"):
        await server.generate([1], sampling, "bad", image_data=[object()])
    assert (await generate(server)).stop_reason in ("length", "stop")


async def test_a_server_sleeps_until_its_memory_and_its_weights_are_back(server, buckets):
    await asyncio.gather(*(generate(server, row) for row in range(16)))
    await server.end_step()
    await server.release_kv_cache()  # which verl does alone, and then all
    await server.sleep()
    with pytest.raises(RuntimeError, match="memory of kv_cache and weights has been released"):
        await generate(server)
    await server.resume_memory(["weights"])
    await update(server, buckets)
    await server.resume_memory(["kv_cache"])
    assert (await generate(server)).stop_reason in ("length", "stop")


async def test_a_server_does_not_sleep_while_it_generates(server):
    running = [asyncio.create_task(generate(server, row, max_tokens=200)) for row in range(4)]
    while (await server.engine.async_health())["inflight"] < 4:
        await asyncio.sleep(0.05)
    with pytest.raises(RuntimeError, match="4 requests are in flight"):
        await server.sleep()
    assert {output.stop_reason for output in await asyncio.gather(*running)} <= {"length", "stop"}


async def test_ranks_that_do_not_answer_an_update_are_an_error(server, buckets, monkeypatch):
    """The last test: SGLang's messenger waits for those answers, so the engine must be started again."""
    monkeypatch.setattr(server.engine, "config", replace(server.engine.config, timeout_s=1.0))
    with stopped_schedulers(), pytest.raises(TimeoutError, match=r"did not take a bucket of weights within 1\.0 s"):
        await server.update_bucket(request_of(buckets[0]))
    with pytest.raises(TimeoutError):
        await server.update_bucket(request_of(buckets[0]))
