"""What an engine cannot be started with is an error before any process starts."""

import socket
from pathlib import Path

import pytest

from moebius_engine.config import SwitchConfig


@pytest.fixture
def no_process(monkeypatch):
    """SGLang's Engine, which would start processes, must not be reached."""
    from sglang.srt.entrypoints.engine import Engine

    def start(self, **arguments):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(Engine, "__init__", start)


@pytest.fixture(scope="module")
def small_models(tmp_path_factory):
    from recipes.tiny_moe import make_tiny_moe

    def make(name, **sizes):
        return str(make_tiny_moe(tmp_path_factory.mktemp("odd") / name, layers=1, hidden=32, **sizes))

    return make


def refused_start(*args, **kwargs) -> str:
    from moebius_engine.engine import SwitchingEngine

    with pytest.raises(ValueError) as caught:
        SwitchingEngine(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "ranks", "texts"),
    [
        ({}, 3, ["ranks=3", "experts=8"]),
        ({"intermediate": 66}, 4, ["ranks=4", "intermediate=66"]),
        ({"q_heads": 6, "kv_heads": 2}, 4, ["ranks=4", "q_heads=6"]),
        ({"q_heads": 12, "kv_heads": 6, "experts": 12}, 4, ["ranks=4", "kv_heads=6"]),
        ({}, 1, ["ranks=1", "2"]),
    ],
)
def test_ranks_that_do_not_fit_the_model(no_process, small_models, sizes, ranks, texts):
    message = refused_start(small_models("odd", **sizes), ranks=ranks)
    assert all(text in message for text in texts), message


def test_more_ranks_than_the_machine_allows(no_process, small_models, monkeypatch):
    from moebius_engine.sglang import arguments

    monkeypatch.setattr(arguments.os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(arguments.environment, "is_needed", lambda: True)
    message = refused_start(small_models("wide", q_heads=8, kv_heads=8), ranks=8)
    assert "ranks=8" in message and "4" in message


def test_ranks_on_a_single_gpu(no_process, small_models, monkeypatch):
    from moebius_engine.sglang import arguments

    monkeypatch.setattr(arguments.environment, "is_needed", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    message = refused_start(small_models("plain"), ranks=2)
    assert "ranks=2" in message and "this machine's 1 (its GPUs)" in message
    assert "share_gpu" in message and "CUDA_VISIBLE_DEVICES=" in message


def test_tied_embeddings(no_process, small_models):
    path = Path(small_models("tied")) / "config.json"
    path.write_text(path.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    message = refused_start(str(path.parent))
    assert "tie_word_embeddings=True" in message and "lm_head.weight" in message


def test_an_unknown_model_type(no_process, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    message = refused_start(str(tmp_path))
    assert "'llama'" in message and "qwen3_moe" in message


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ({"tp_size": 2}, ["tp_size=2", "ranks=2"]),
        ({"speculative_algorithm": "EAGLE"}, ["speculative_algorithm='EAGLE'", "draft models"]),
        ({"quantization": "fp8"}, ["quantization='fp8'"]),
        ({"moe_a2a_backend": "deepep"}, ["moe_a2a_backend='deepep'", "docs/deepep.md"]),
        ({"disable_piecewise_cuda_graph": False}, ["disable_piecewise_cuda_graph=False", "only True", "in TP only"]),
    ],
)
def test_arguments_that_contradict_switching(no_process, tiny_moe, arguments, texts):
    message = refused_start(tiny_moe, ranks=2, switch=SwitchConfig(), **arguments)
    assert all(text in message for text in texts), message


def test_no_layout_captures_prefills():
    """SGLang would in TP, by default, on a GPU: minutes of torch.compile for a layout that prefills little."""
    from moebius_engine.sglang.arguments import both_layouts

    for arguments in both_layouts(2, {}, timeout_s=60.0):
        assert arguments["disable_piecewise_cuda_graph"] is True


def test_a_port_in_use(no_process, tiny_moe):
    from moebius_engine.sglang.ports import free_port

    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        message = refused_start(tiny_moe, ranks=2, port=port)
    assert f"port={port}" in message and "in use" in message


def test_a_port_that_sglang_cannot_take(no_process, tiny_moe):
    """It also derives port + 10000, which must be a port too."""
    message = refused_start(tiny_moe, ranks=2, port=57440)
    assert "port=57440" in message and "55535" in message


def test_timeouts_by_each_ranks_own_clock(no_process, small_models, monkeypatch):
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "30")
    message = refused_start(small_models("plain"), ranks=2)
    assert message.startswith("SGLANG_REQ_RUNNING_TIMEOUT=30: each rank would end requests by a clock of its own")
