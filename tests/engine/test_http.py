"""`moebius-rollout serve` as its users run it: a process of its own, asked over HTTP."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests

from moebius_engine.sglang.ports import free_port
from tests.engine.inflight import prompts

KEY = {"Authorization": "Bearer hush"}
GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 48}
START_S = 240


class Server:
    """The command, its address and its requests; each has a deadline."""

    def __init__(self, model: str, log: Path):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [str(Path(sys.executable).with_name("moebius-rollout")), "serve"]
        options = {"--model": model, "--ranks": 2, "--port": port, "--policy": "ep"}
        options |= {"--max-body-mb": 1, "--max-samples": 64}
        settings = {
            "api_key": "hush",
            "log_level": "info",
            "chat_template": "chatml",
            "context_length": 2048,
            "max_running_requests": 32,
        }
        command += [str(part) for option in options.items() for part in option]
        command += [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_S
        while "is served at" not in log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, headers=KEY, timeout=60)

    def post(self, path: str, **body) -> requests.Response:
        return requests.post(self.url + path, json=body, headers=KEY, timeout=60)

    def events(self, path: str, **body) -> Iterator[dict]:
        """What a stream sends, up to [DONE]."""
        with requests.post(
            self.url + path, json=body | {"stream": True}, headers=KEY, timeout=60, stream=True
        ) as answer:
            assert answer.status_code == 200, answer.text
            for line in answer.iter_lines():
                if line == b"data: [DONE]":
                    return
                if line:
                    yield json.loads(line.removeprefix(b"data: "))
        pytest.fail("the stream ended without [DONE]")


@pytest.fixture(scope="module")
def server(tiny_moe, tmp_path_factory):
    server = Server(tiny_moe, tmp_path_factory.mktemp("serve") / "log")
    yield server
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    assert "leaked" not in server.log.read_text(), "Python's resource tracker found what a rank has left"


def test_all_its_processes_listen_on_loopback_only(server):
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    listening = [
        connection.laddr
        for process in processes
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    assert int(server.url.rsplit(":", 1)[1]) in {address.port for address in listening}
    assert len(listening) > 10, "SGLang's and torch's own are among them"
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_nothing_that_it_shows_or_logs_has_the_key(server):
    pages = [server.get(path).text for path in ("/server_info", "/moebius/state", "/model_info")]
    assert "max_running_requests" in pages[0] and "server_args=" in server.log.read_text()
    assert not any("hush" in text for text in (*pages, server.log.read_text()))


def test_what_would_be_unpickled_needs_the_admin_key_which_this_server_has_not(server):
    tensors = {"serialized_named_tensors": ["gASVEAAAAAAAAACMBWJ1aWx0aW5zlC4="] * 2}
    assert server.post("/update_weights_from_tensor", **tensors).status_code == 403


def test_a_request_that_is_too_large_is_refused(server):
    answer = server.post("/generate", text="a" * (1 << 20))
    assert answer.status_code == 413 and "at most 1048576 bytes" in answer.text
    answer = server.post("/generate", input_ids=[[5, 6]] * 9, sampling_params=GREEDY | {"n": 8})
    assert answer.status_code == 400 and "72 samples: one request may ask for 64" in answer.text
    answer = server.post("/v1/completions", model="x", prompt="a", n=65)
    assert answer.status_code == 400 and "65 samples" in answer.text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("get", "/moebius/state"),
        ("post", "/moebius/switch"),
        ("post", "/moebius/trace"),
        ("post", "/generate"),
        ("get", "/model_info"),
    ],
)
def test_without_the_key_nothing_is_answered(server, method, path):
    answer = requests.request(method, server.url + path, json={"layout": "tp"}, timeout=60)
    assert answer.status_code == 401
    assert server.get("/moebius/state").json()["layout"] == "ep"


def test_health_needs_no_key_and_makes_a_token(server):
    before = server.get("/moebius/state").json()["ranks"][0]["forward_ct"]
    assert requests.get(server.url + "/health_generate", timeout=60).status_code == 200
    assert server.get("/moebius/state").json()["ranks"][0]["forward_ct"] > before


def test_generate_takes_text_and_token_ids(server):
    text, ids = "hello", list(map(int, server.post("/v1/tokenize", model="x", prompt="hello").json()["tokens"]))
    answers = [
        server.post("/generate", sampling_params=GREEDY, **row).json() for row in ({"text": text}, {"input_ids": ids})
    ]
    assert answers[0]["output_ids"] == answers[1]["output_ids"]
    assert answers[0]["meta_info"]["completion_tokens"] == 48


def test_samples_of_completions_are_requests_of_their_own(server):
    body = {"model": "x", "prompt": ["abc", "de"], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    one, three = server.post("/v1/completions", **body).json(), server.post("/v1/completions", n=3, **body).json()
    assert [choice["index"] for choice in three["choices"]] == list(range(6))
    expected = [choice["text"] for choice in one["choices"] for _ in range(3)]
    assert [choice["text"] for choice in three["choices"]] == expected
    assert three["usage"]["completion_tokens"] == 30


def test_a_chat_streams_what_it_answers_at_once(server):
    body = {"model": "x", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 24, "temperature": 0}
    whole = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    deltas = [event["choices"][0]["delta"] for event in server.events("/v1/chat/completions", **body)]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole != ""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [[5, 6], [5, 512]]}, "input_ids[1]=512 lies outside the vocabulary of 512 tokens"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": 4000}}, "exceed the context of 2048 tokens"),
        ({"input_ids": [5], "sampling_params": {"sampling_seed": 1}}, "seeded=True"),
        ({"input_ids": [5], "rid": "HEALTH_CHECK_1"}, "SGLang takes ids"),
        ({"input_embeds": [[0.0] * 64]}, "input_embeds is not supported"),
        ({"input_ids": [5], "custom_logit_processor": '{"callable": "80"}'}, "custom_logit_processor is not supported"),
        ({"text": "a", "input_ids": [5]}, "either input_ids or prompt"),
    ],
)
def test_a_bad_row_is_answered_with_400_and_the_reason(server, body, message):
    answer = server.post("/generate", **body)
    assert answer.status_code == 400 and message in answer.text
    (event,) = server.events("/generate", **body)
    assert message in event["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [512], "max_tokens": 4}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 4, "regex": "a*"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 3000}], "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "seed": 1}),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [5]}),
        ("/moebius/switch", {"layout": "pp"}),
        ("/release_memory_occupation", {"tags": ["weight"]}),
    ],
)
def test_other_routes_answer_400_too(server, path, body):
    assert server.post(path, model="x", **body).status_code == 400


@pytest.mark.slow
def test_a_stream_refused_for_its_id_leaves_the_owner_of_the_id_alone(server):
    body = {"input_ids": [5, 6, 7], "rid": "mine", "sampling_params": GREEDY | {"max_new_tokens": 500}}
    events = server.events("/generate", **body)
    next(events)
    (refused,) = server.events("/generate", **body)
    refused_at = time.monotonic()
    assert "already in use" in refused["error"]["message"]
    *_, last = events
    assert time.monotonic() - refused_at > 2, "SGLang aborts a stream's ids only after two seconds"
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 500}


def test_a_stream_goes_on_through_switches_without_a_gap_or_a_repeat(server):
    rows = prompts(6)
    body = {"input_ids": rows, "sampling_params": GREEDY}
    unswitched = [answer["output_ids"] for answer in server.post("/generate", **body).json()]
    seen: list[list[int]] = [[] for _ in rows]
    records = []
    for event in server.events("/generate", **body):
        tokens, index = event["output_ids"], event["index"]
        assert tokens[: len(seen[index])] == seen[index], "a chunk holds all tokens so far"
        seen[index] = tokens
        if min(map(len, seen)) >= 8 * (len(records) + 1) and len(records) < 2:
            records.append(server.post("/moebius/switch", layout="tp" if not records else "ep").json())
    assert [(r["source"], r["target"], r["running"], r["refused"]) for r in records] == [
        ("ep", "tp", 6, None),
        ("tp", "ep", 6, None),
    ]
    assert seen == unswitched
    assert server.get("/moebius/state").json()["layout"] == "ep"


def test_the_trace_is_what_happened_since_the_last_call(server):
    server.post("/moebius/trace")
    server.post("/generate", input_ids=[5, 6], sampling_params=GREEDY)
    server.post("/moebius/switch", layout="tp")
    server.post("/moebius/switch", layout="ep")
    trace = server.post("/moebius/trace").json()
    assert [record["target"] for record in trace["switches"]] == ["tp", "ep"]
    assert max(sample["inflight"] for sample in trace["samples"]) == 1
    assert server.post("/moebius/trace").json()["switches"] == []


def test_sglang_s_own_routes_answer_in_both_layouts(server):
    for layout in ("tp", "ep"):
        server.post("/moebius/switch", layout=layout)
        for path in ("/model_info", "/server_info", "/v1/models", "/v1/loads", "/health", "/flush_cache"):
            assert server.get(path).status_code == 200, (layout, path)


def test_memory_is_not_released_under_a_request(server):
    events = server.events("/generate", input_ids=[5, 6], rid="held", sampling_params=GREEDY | {"max_new_tokens": 1000})
    next(events)
    answer = server.post("/release_memory_occupation", tags=["kv_cache"])
    assert answer.status_code == 400 and "1 requests are in flight" in answer.text
    assert server.post("/abort_request", rid="held").status_code == 200
    *_, last = events
    assert last["meta_info"]["finish_reason"]["type"] == "abort"


def test_health_is_a_metric(server):
    state = server.get("/moebius/state").json()
    assert state["state"] == "ready" and [psutil.pid_exists(pid) for pid in state["pids"]] == [True, True]
    lines = server.get("/moebius/metrics").text.splitlines()
    assert 'moebius_engine_state{moebius_engine_state="ready"} 1.0' in lines
    silences = [float(line.split()[1]) for line in lines if line.startswith("moebius_rank_silence_seconds{")]
    assert len(silences) == 2 and max(silences) < 8


@pytest.mark.slow
def test_a_dead_engine_ends_the_server_with_its_error(tiny_moe, tmp_path):
    server = Server(tiny_moe, tmp_path / "log")
    body = {"input_ids": [5, 6], "sampling_params": GREEDY | {"max_new_tokens": 1500}}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(server.post, "/generate", **body)
        while not (state := server.get("/moebius/state").json())["inflight"]:
            time.sleep(0.05)
        os.kill(state["pids"][1], signal.SIGKILL)
        assert answer.result().status_code == 503
    assert f"the engine is dead: rank 1 (pid {state['pids'][1]}) was ended by SIGKILL" in answer.result().text
    assert server.process.wait(60) == 1
    assert "Error: the engine is dead: rank 1" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_sigterm_ends_every_process_and_the_streams(server):
    """The last test: it stops the server that all share."""
    # Few tokens: they have ten seconds.
    events = server.events("/generate", input_ids=[5, 6], sampling_params=GREEDY | {"max_new_tokens": 12})
    next(events)
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    server.process.send_signal(signal.SIGTERM)
    *_, last = events
    assert last["meta_info"]["finish_reason"]["type"] == "length"
    assert server.process.wait(60) == 0
    assert "leaked" not in server.log.read_text(), "Python's resource tracker found what a rank has left"
    assert not psutil.wait_procs(processes, timeout=10)[1]
