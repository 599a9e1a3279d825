"""Bad input gets a clear error and takes nothing else down: a bad row fails alone, a bad engine before it starts."""

import asyncio

import pytest

from tests.engine.inflight import GREEDY, prompts, wait_for_steps

SHORT = GREEDY | {"max_new_tokens": 8}
GOOD = [11, 12, 13]

# Row or parameters → words of the message.
BAD_PROMPTS = [
    ([], ["empty"]),
    ([7] * 2042, ["2042", "2041"]),
    ([7] * 3000, ["3000", "2041", "2048"]),
    ([5, 512], ["input_ids[1]=512", "vocabulary of 512"]),
    ([-1], ["input_ids[0]=-1"]),
    ([1.5], ["1.5", "not an integer"]),
    ((1, 2), ["tuple", "list of integers"]),
    ([[1]], ["[1]", "not an integer"]),
]
BAD_PARAMS = [
    ({"max_new_tokens": -1}, ["max_new_tokens=-1"]),
    ({"max_new_tokens": 2046}, ["max_new_tokens=2046", "3 tokens", "2048"]),
    ({"min_new_tokens": 9}, ["min_new_tokens", "8", "9"]),
    ({"temperature": -0.5}, ["temperature", "-0.5"]),
    ({"temperature": float("nan")}, ["temperature=nan"]),
    ({"temperature": 10**400}, ["temperature"]),
    ({"top_p": 0.0}, ["top_p", "0.0"]),
    ({"top_k": 0, "temperature": 1.0}, ["top_k", "0"]),
    ({"top_k": 2**31}, ["top_k", str(2**31), str(2**30)]),
    ({"repetition_penalty": 1e-40}, ["repetition_penalty", "1e-40"]),
    ({"logit_bias": {"600": 1.0}}, ["logit_bias", "600", "512"]),
    ({"logit_bias": {"5": 1e39}}, ["logit_bias", "1e+39"]),
    ({"sampling_seed": 1}, ["sampling_seed", "seeded=True"]),
    ({"stop_token_ids": [512]}, ["stop_token_ids[0]=512", "512"]),
    ({"stop_regex": "(a"}, ["stop_regex", "(a"]),
    ({"stop": 5}, ["stop=5"]),
    ({"stream_interval": 0}, ["stream_interval=0"]),
    ({"n": 0}, ["n=0"]),
    ({"temprature": 1.0}, ["temprature"]),
    ("greedy", ["str", "dict"]),
]


def refusal(answer: dict) -> str:
    """The message of a refused row, which has no tokens."""
    reason = answer["meta_info"]["finish_reason"]
    assert (answer["output_ids"], reason["type"], reason["status_code"]) == ([], "abort", 400), answer
    return reason["message"]


@pytest.fixture(scope="module")
def good_tokens(switching_engine):
    switching_engine.switch("ep")
    return switching_engine.generate(input_ids=GOOD, sampling_params=SHORT)["output_ids"]


@pytest.mark.parametrize("layout", ["ep", "tp"])
def test_only_bad_rows_of_a_batch_fail(engine, good_tokens, layout):
    engine.switch(layout)
    rows = [row for row, _ in BAD_PROMPTS] + [GOOD] * len(BAD_PARAMS)
    params = [SHORT] * len(BAD_PROMPTS) + [
        SHORT | change if isinstance(change, dict) else change for change, _ in BAD_PARAMS
    ]
    answers = engine.generate(input_ids=[GOOD, *rows, GOOD], sampling_params=[SHORT, *params, SHORT])
    for answer, (_, texts) in zip(answers[1:-1], BAD_PROMPTS + BAD_PARAMS, strict=True):
        message = refusal(answer)
        assert all(text in message for text in texts), message
    assert answers[0]["output_ids"] == answers[-1]["output_ids"] == good_tokens


@pytest.mark.parametrize("row", [[], [7] * 3000, [5, 512], (1, 2)], ids=["empty", "long", "token", "tuple"])
def test_a_bad_row_alone_is_answered(engine, row):
    assert refusal(engine.generate(input_ids=row, sampling_params=SHORT))


@pytest.mark.parametrize("layout", ["ep", "tp"])
def test_no_tokens_asked_for_is_a_full_answer(engine, layout):
    engine.switch(layout)
    none, some = engine.generate(input_ids=[GOOD, GOOD], sampling_params=[SHORT | {"max_new_tokens": 0}, SHORT])
    assert (none["output_ids"], none["meta_info"]["finish_reason"]) == ([], {"type": "length", "length": 0})
    assert len(some["output_ids"]) == 8


def test_logprob_arguments_are_checked_by_row(engine, good_tokens):
    answers = engine.generate(
        input_ids=[GOOD] * 5,
        sampling_params=SHORT,
        return_logprob=[True, True, True, False, True],
        top_logprobs_num=[2, 513, 0, 0, None],
        logprob_start_len=[0, -1, 4, -1, None],
    )
    assert "top_logprobs_num=513" in refusal(answers[1])
    assert "logprob_start_len=4" in refusal(answers[2])
    assert all(answers[row]["output_ids"] == good_tokens for row in (0, 3, 4))
    assert len(answers[0]["meta_info"]["output_top_logprobs"][0]) == 2
    assert len(answers[4]["meta_info"]["output_token_logprobs"]) == 8


@pytest.mark.parametrize("layout", ["ep", "tp"])
def test_extreme_values_that_are_let_in_do_no_harm(engine, good_tokens, layout):
    """What overflows in sampling would end the scheduler: alone, and beside a plain row."""
    engine.switch(layout)
    everything = {str(token): 1e30 for token in range(512)}
    extremes = [
        {"temperature": 1e-6, "repetition_penalty": 1e-6},
        {"temperature": 1e-6, "logit_bias": everything},
        {"temperature": 1e-6, "logit_bias": {"5": 1e30, "6": -1e30}},
        {"temperature": 3e38},
        {"temperature": 1.0, "top_p": 1e-300, "min_p": 1.0, "top_k": 2**30},
        {"frequency_penalty": -2.0, "presence_penalty": -2.0, "repetition_penalty": 2.0},
        {"min_new_tokens": 8, "stop_token_ids": [0, 511]},
    ]
    params = [SHORT | extreme for extreme in extremes]
    logprobs = {"return_logprob": True, "logprob_start_len": [0, 3, -1, 0, 2, -1, 0, 1]}
    logprobs["top_logprobs_num"] = [0, 3, 0, 512, 1, 0, 0, 2]
    answers = engine.generate(input_ids=[GOOD] * 8, sampling_params=[*params, SHORT], **logprobs)
    assert all(len(answer["output_ids"]) == 8 for answer in answers)
    assert answers[2]["output_ids"] == [5] * 8
    assert answers[7]["output_ids"] == good_tokens


def test_a_request_id_is_used_once(engine, good_tokens):
    first, second, third = engine.generate(
        input_ids=[GOOD] * 3, sampling_params=SHORT, rid=["twice", "twice", "HEALTH_CHECK_1"]
    )
    assert first["output_ids"] == good_tokens
    assert "'twice' is already in use" in refusal(second)
    assert "health checks" in refusal(third)

    async def against_a_live_one():
        live = asyncio.ensure_future(engine.async_generate(input_ids=GOOD, sampling_params=GREEDY, rid="live"))
        await wait_for_steps(engine, 2)
        second = await engine.async_generate(input_ids=GOOD, sampling_params=SHORT, rid="live")
        return await live, second

    live, second = engine._run(against_a_live_one())
    assert len(live["output_ids"]) == 48 and "'live' is already in use" in refusal(second)
    assert engine.generate(input_ids=GOOD, sampling_params=SHORT, rid="live")["output_ids"] == good_tokens


@pytest.mark.parametrize("layout", ["ep", "tp"])
@pytest.mark.parametrize("state", ["running", "waiting"])
def test_abort_means_exactly_the_id_named(engine, layout, state):
    """The id "req-1" is a prefix of "req-10". Waiting: 32 places, all taken by earlier requests."""
    engine.switch(layout)

    async def go():
        others = []
        if state == "waiting":
            rids = [f"other-{row}" for row in range(70)]
            others = [engine.async_generate(input_ids=prompts(70), sampling_params=GREEDY, rid=rids)]
        long = GREEDY | {"max_new_tokens": 60}
        pair = engine.async_generate(input_ids=[GOOD, GOOD], sampling_params=long, rid=["req-1", "req-10"])
        tasks = [asyncio.ensure_future(call) for call in (*others, pair)]
        await wait_for_steps(engine, 3)
        health = await engine.async_health()
        assert any(rank["waiting"] for rank in health["ranks"]) == (state == "waiting"), health
        await engine.async_abort("req-1")
        if others:
            await engine.async_abort(abort_all=False, rid="other")  # nobody's id
        return [await task for task in tasks]

    *others, (aborted, kept) = engine._run(go())
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort" and len(aborted["output_ids"]) < 60
    assert kept["meta_info"]["finish_reason"]["type"] == "length" and len(kept["output_ids"]) == 60
    assert all(len(answer["output_ids"]) == 48 for batch in others for answer in batch)
    assert not engine.tokenizer_manager.rid_to_state  # an id is free again once its request has ended


def test_streaming_with_a_bad_row(engine, good_tokens):
    last: dict[int, dict] = {}
    rows = [GOOD, [], GOOD]
    for chunk in engine.generate(input_ids=rows, sampling_params=SHORT, stream=True):
        last[chunk["index"]] = chunk
    assert sorted(last) == [0, 1, 2]
    assert "empty" in refusal(last[1])
    assert all(last[row]["output_ids"] for row in (0, 2))
    assert last[0]["text"] == last[2]["text"]
    (only,) = engine.generate(input_ids=[], sampling_params=SHORT, stream=True)
    assert "empty" in refusal(only)


def test_samples_of_a_row_stand_together(engine, good_tokens):
    several = SHORT | {"n": 2}
    first, second = engine.generate(input_ids=GOOD, sampling_params=several)
    assert first["output_ids"] == second["output_ids"] == good_tokens
    answers = engine.generate(input_ids=[[], GOOD], sampling_params=several, rid=["a", "b"], return_logprob=True)
    assert [answer["meta_info"]["id"] for answer in answers] == ["a_0", "a_1", "b_0", "b_1"]
    assert [len(answer["output_ids"]) for answer in answers] == [0, 0, 8, 8]
    last = {
        chunk["index"]: chunk for chunk in engine.generate(input_ids=[[], GOOD], sampling_params=several, stream=True)
    }
    assert sorted(last) == [0, 1, 2, 3] and last[2]["text"] == last[3]["text"]
    assert not engine.tokenizer_manager.rid_to_state


def test_text_prompts(engine):
    text = "How many"
    answers = engine.generate(prompt=[text, "", "x" * 3000, "\ud800", text], sampling_params=SHORT)
    assert "empty" in refusal(answers[1])
    assert "3000" in refusal(answers[2])
    assert "Unicode" in refusal(answers[3])
    ids = engine.tokenizer_manager.tokenizer(text)["input_ids"]
    by_ids = engine.generate(input_ids=ids, sampling_params=SHORT)
    assert answers[0]["text"] == answers[4]["text"] == by_ids["text"]
    assert engine.generate(prompt=text, sampling_params=SHORT)["output_ids"] == by_ids["output_ids"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "either input_ids or prompt"),
        ({"input_ids": GOOD, "prompt": "a"}, "not both"),
        ({"prompt": [1]}, "prompt"),
        ({"input_ids": [GOOD] * 2, "sampling_params": [SHORT] * 3}, "3 entries for 2 prompts"),
        ({"input_ids": GOOD, "lora_path": ["a"]}, "lora_path"),
        ({"input_ids": GOOD, "token_ids_logprob": [5]}, "token_ids_logprob is not supported"),
        ({"input_ids": GOOD, "return_hidden_states": True}, "enable_return_hidden_states"),
        ({"input_ids": GOOD, "priority": "high"}, "priority='high'"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused_as_a_whole(engine, arguments, text):
    with pytest.raises(ValueError, match=text):
        engine.generate(**arguments)
    assert not engine.tokenizer_manager.rid_to_state


def test_scores_are_refused(engine):
    """They would go past the door, and end the engine if two came together."""
    with pytest.raises(ValueError, match="score is not supported by a switching engine: SGLang"):
        engine.score(query="a", items=["b", "c"], label_token_ids=[5, 6])
    assert not engine.tokenizer_manager.rid_to_state


def test_a_second_engine_takes_other_ports(engine):
    from moebius_engine.sglang.ports import PortBlock, free_port

    assert abs(free_port() - engine.server_args.port) >= 240
    with pytest.raises(ValueError, match="in use"):
        PortBlock(engine.server_args.port)
