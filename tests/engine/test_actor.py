"""RolloutActor in Ray over a real engine: every call that the rest of the service makes."""

import time

import pytest
import ray
from safetensors.torch import load_file

from moebius_engine.telemetry import StepReport, read_json_lines
from rollout.actor import remote_actor

WAIT_S = 240
GREEDY = {"temperature": 0.0, "ignore_eos": True}
THRESHOLD = 6
# A tail after the burst: 12 requests, of which 4 live on.
LENGTHS = [8] * 8 + [40, 48, 56, 64]
PROMPTS = [[20 + row, *range(30, 40)] for row in range(12)]


@pytest.fixture(scope="module")
def metrics_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("metrics")


@pytest.fixture(scope="module")
def actor(tiny_moe, metrics_dir):
    ray.init(num_cpus=2, include_dashboard=False)
    handle = remote_actor(num_cpus=1).remote(
        tiny_moe,
        ranks=2,
        switch={"policy": "rollout", "threshold": THRESHOLD, "timeout_s": 120, "seeded": True},
        server_args={"skip_tokenizer_init": True, "random_seed": 0, "max_total_tokens": 8192, "context_length": 2048},
        metrics_dir=str(metrics_dir),
    )
    try:
        get(handle.health.remote())
        yield handle
        get(handle.shutdown.remote())
    finally:
        ray.kill(handle)
        ray.shutdown()


def get(reference):
    return ray.get(reference, timeout=WAIT_S)


def lengths(values):
    return [{**GREEDY, "max_new_tokens": length} for length in values]


def wait_until_inflight(actor, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while get(actor.progress.remote())["inflight"] != count:
        assert time.monotonic() < deadline, f"{count} requests were never in flight"
        time.sleep(0.02)


def test_a_step_switches_and_is_reported(actor, metrics_dir):
    get(actor.begin_step.remote(0, requests=12))
    batch = get(actor.generate_batch.remote(PROMPTS, sampling=lengths(LENGTHS)))
    report = get(actor.end_step.remote())
    assert [len(sample.output_ids) for (sample,) in batch] == LENGTHS
    assert all(len(sample.logprobs) == len(sample.output_ids) for (sample,) in batch)
    assert all(sample.finish_reason["type"] == "length" for (sample,) in batch)
    assert report.tokens_burst + report.tokens_tail == report.tokens == sum(LENGTHS)
    assert report.burst_s > 0 and report.tail_s > 0
    assert report.burst_s + report.tail_s == pytest.approx(report.step_s)
    assert (report.switches, report.inflight_at_switch, report.layout_at_end) == (1, 4, "tp")
    assert report.bytes_moved > 0
    parts = (report.switch_ms_decide, report.switch_ms_metadata, report.switch_ms_kv, report.switch_ms_weights)
    assert sum(parts) + report.switch_ms_rest == pytest.approx(report.switch_ms_total)
    assert (report.responses, report.longest_response) == (12, 64)
    assert 0 <= report.idle_rank_share < 1
    assert 1 <= report.expert_skew <= report.expert_skew_worst <= 2
    assert report.inflight[-1][1] == 0
    assert get(actor.report.remote())[-1] == report
    assert read_json_lines(metrics_dir / "steps.jsonl", StepReport)[-1] == report


def test_samples_of_a_seed_are_those_of_a_run_that_did_not_switch(actor):
    """Drawn at temperature 1, each sample by its own seed: in one step across a switch, in the other in TP alone."""
    drawn = [
        {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": length, "sampling_seed": row}
        for row, length in enumerate(LENGTHS)
    ]
    steps = []
    for number, requests in enumerate((12, 4)):  # a step of fewer requests than the threshold begins in TP
        get(actor.begin_step.remote(number, requests=requests))
        batch = get(actor.generate_batch.remote([PROMPTS[0]] * 12, sampling=drawn))
        report = get(actor.end_step.remote())
        steps.append(([sample.output_ids for (sample,) in batch], report.inflight_at_switch))
    (switched, inflight), (plain, _) = steps
    assert inflight and switched == plain
    assert len({tuple(tokens[:8]) for tokens in plain}) == 12


def test_samples_of_a_prompt_stand_together(actor):
    batch = get(actor.generate_batch.remote(PROMPTS[:3], n=2, sampling={**GREEDY, "max_new_tokens": 6}))
    assert [len(samples) for samples in batch] == [2, 2, 2]
    assert all(one.output_ids == two.output_ids for one, two in batch)  # greedy
    assert len({tuple(one.output_ids) for one, _ in batch}) > 1


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "empty"),
        ([5, 9999], {}, "outside the vocabulary"),
        ([7] * 3000, {}, "shorten the prompt"),
        ([5], {"temperature": -1.0}, "temperature"),
        ([5], {"top_q": 1.0}, "top_q"),
    ],
)
def test_a_bad_row_fails_alone(actor, prompt, sampling, message):
    good = {**GREEDY, "max_new_tokens": 5}
    (bad,), (fine,) = get(actor.generate_batch.remote([prompt, [1, 2, 3]], sampling=[{**good, **sampling}, good]))
    assert (bad.output_ids, bad.finish_reason["type"], bad.finish_reason["status_code"]) == ([], "abort", 400)
    assert message in bad.finish_reason["message"]
    assert len(fine.output_ids) == 5


def test_a_duplicate_id_fails_alone(actor):
    batch = get(
        actor.generate_batch.remote(
            [[1, 2], [3, 4]], sampling={**GREEDY, "max_new_tokens": 5}, request_ids=["same", "same"]
        )
    )
    assert sorted(len(sample.output_ids) for (sample,) in batch) == [0, 5]


def test_zero_tokens_are_a_full_answer(actor):
    ((sample,),) = get(actor.generate_batch.remote([[1, 2, 3]], sampling={**GREEDY, "max_new_tokens": 0}))
    assert (sample.output_ids, sample.finish_reason["type"]) == ([], "length")


def test_abort_means_exactly_this_id_and_progress_is_seen_meanwhile(actor):
    ids = ["row-1", "row-11"]
    running = actor.generate_batch.remote([[1, 2], [3, 4]], sampling=lengths([900, 120]), request_ids=ids)
    wait_until_inflight(actor, 2)
    assert get(actor.abort.remote(["row-1", "row"])) == ["row-1"]
    (aborted,), (other,) = get(running)
    assert aborted.finish_reason["type"] == "abort" and len(aborted.output_ids) < 900
    assert len(other.output_ids) == 120
    assert get(actor.progress.remote())["inflight"] == 0


def test_abort_of_all_and_the_deadline_leave_nothing_in_flight(actor):
    running = actor.generate_batch.remote(PROMPTS, sampling={**GREEDY, "max_new_tokens": 900})
    wait_until_inflight(actor, 12)
    assert len(get(actor.abort.remote())) == 12
    assert {sample.finish_reason["type"] for (sample,) in get(running)} == {"abort"}
    ((late,),) = get(actor.generate_batch.remote([[1, 2]], sampling=lengths([1900]), timeout_s=1.0))
    assert late.finish_reason["type"] == "abort" and len(late.output_ids) < 1900
    health = get(actor.health.remote())
    assert (health["ok"], health["inflight"]) == (True, 0)


def test_a_weight_update_counts_and_takes_effect(actor, tiny_moe):
    sampling = {**GREEDY, "max_new_tokens": 12}
    ((before,),) = get(actor.generate_batch.remote([[1, 2, 3]], sampling=sampling))
    weights = load_file(f"{tiny_moe}/model.safetensors")
    record = get(actor.update_weights.remote([(name, tensor * 0.9) for name, tensor in weights.items()]))
    assert record.tensors == len(weights)
    ((changed,),) = get(actor.generate_batch.remote([[1, 2, 3]], sampling=sampling))
    assert changed.weight_version_begin == before.weight_version_end + 1
    assert changed.logprobs != before.logprobs
    get(actor.update_weights.remote(list(weights.items())))
    ((restored,),) = get(actor.generate_batch.remote([[1, 2, 3]], sampling=sampling))
    assert restored.output_ids == before.output_ids
    get(actor.begin_step.remote(1))
    assert get(actor.end_step.remote()).weight_update_s > 0


def test_a_bad_weight_update_is_an_error_with_the_name(actor, tiny_moe):
    weights = load_file(f"{tiny_moe}/model.safetensors")
    weights["model.layers.0.mlp.experts.0.up.weight"] = weights.pop("model.layers.0.mlp.experts.0.up_proj.weight")
    with pytest.raises(ValueError, match=r"experts\.0\.up\.weight"):
        get(actor.update_weights.remote(list(weights.items())))
    weights["model.layers.0.mlp.experts.0.up_proj.weight"] = weights.pop("model.layers.0.mlp.experts.0.up.weight")
    get(actor.update_weights.remote(list(weights.items())))
    assert get(actor.health.remote())["weights_valid"]


def test_an_aborted_response_goes_on_from_its_tokens(actor):
    """What docs/other_loops.md says of partial rollouts: prompt and tokens so far are sent as the new prompt."""
    prompt, total = [1, 2, 3], 400
    ((whole,),) = get(actor.generate_batch.remote([prompt], sampling=lengths([total])))
    running = actor.generate_batch.remote([prompt, [7, 8]], sampling=lengths([total, 40]), request_ids=["cut", "short"])
    wait_until_inflight(actor, 2)
    wait_until_inflight(actor, 1)  # the short one has ended, so the other has tokens
    assert get(actor.abort.remote(["cut"])) == ["cut"]
    (cut,), _ = get(running)
    assert cut.finish_reason["type"] == "abort" and 0 < len(cut.output_ids) < total
    ((rest,),) = get(
        actor.generate_batch.remote([prompt + cut.output_ids], sampling=lengths([total - len(cut.output_ids)]))
    )
    assert cut.output_ids + rest.output_ids == whole.output_ids
    assert cut.logprobs + rest.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
