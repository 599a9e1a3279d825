"""The memory budget: against the arena, the weight manifest and the transfer's own tables, and the command line."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from moebius_engine.layout import Layout
from moebius_engine.layout.plan import expert_blocks
from moebius_engine.layout.shape import ModelShape
from moebius_engine.memory.arena import Arena
from moebius_engine.memory.budget import GB, Sizes, budget, kv_token_bytes, requests_per_rank, tokens_that_fit
from moebius_engine.memory.presets import PRESETS
from moebius_engine.transfer.strips import strips
from moebius_engine.transfer.tables import tables
from moebius_engine.weights.manifest import is_expert, qwen3_moe_manifest
from rollout.cli import app

H200 = 150 * GB
GIB = 2**30
LARGE = Sizes(
    shape=ModelShape.from_hf_config(PRESETS["Qwen3-235B-A22B"]),
    ranks=8,
    tokens=320_000,
    requests=256,
    context=40960,
    positions=40960,
    itemsize=2,
    kv_itemsize=2,
)


def parts(sizes: Sizes) -> dict[str, int]:
    return {component.key: component.nbytes for component in budget(sizes).components}


@st.composite
def any_sizes(draw) -> Sizes:
    ranks = draw(st.sampled_from([2, 4, 8]))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8, 16]))
    shape = ModelShape(
        model_type="qwen3_moe",
        layers=draw(st.integers(1, 5)),
        hidden=32 * draw(st.integers(1, 4)),
        intermediate=ranks * draw(st.integers(1, 9)),
        experts=ranks * draw(st.integers(1, 4)),
        q_heads=16 * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 64])),
        vocab_size=64 * ranks * draw(st.integers(1, 5)),
    )
    page = draw(st.sampled_from([1, 16]))
    return Sizes(
        shape=shape,
        ranks=ranks,
        tokens=page * draw(st.integers(1, 500)),
        requests=draw(st.integers(1, 64)),
        context=draw(st.integers(1, 5000)),
        positions=4096,
        itemsize=4,
        kv_itemsize=2,
        page=page,
        device=draw(st.sampled_from(["cpu", "cuda"])),
        transfer="collective",
    )


@given(any_sizes())
def test_arena_and_budget_agree(sizes):
    """Slots, spare slots, and the tokens that TP holds, against the arena that an engine allocates."""
    arena = Arena(sizes.shape, sizes.ranks, torch.float32, "meta")
    arena.allocate_kv(sizes.tokens + sizes.page, torch.float16)
    found, slots = parts(replace(sizes, device="cpu")), sizes.shape.layers + 1
    for layers, spare, views in (
        ("experts.both", "spare expert slot.tp", arena.experts(Layout.EP, 0)),
        ("KV cache.both", "spare KV slot.tp", arena.kv(Layout.EP, 0)),
    ):
        allocated = sum(view.untyped_storage().nbytes() for view in views)
        assert (found[layers], found[spare]) == (allocated // slots * (slots - 1), allocated // slots)
    assert budget(sizes).tp_tokens == arena.kv_rows(Layout.TP) - sizes.page


@given(any_sizes())
def test_all_ranks_together_hold_the_checkpoint(sizes):
    """Experts and head once over all ranks; what is not cut, on each."""
    found, manifest = parts(sizes), qwen3_moe_manifest(sizes.shape)
    weights = {name: torch.Size(shape).numel() * sizes.itemsize for name, shape in manifest.items()}
    experts = sum(nbytes for name, nbytes in weights.items() if is_expert(name))
    rounding = sizes.ranks * (4 << 20) if sizes.device == "cuda" else 0
    assert 0 <= found["experts.both"] * sizes.ranks - experts <= rounding
    head = weights["lm_head.weight"]
    each = sum(nbytes for name, nbytes in weights.items() if not is_expert(name)) - head
    of_rank = found["attention.ep"] + found["embedding.ep"] + found["norms, router, head.both"]
    assert of_rank == each + head // sizes.ranks
    assert found["embedding.tp"] * sizes.ranks == found["embedding.ep"]


@given(any_sizes())
def test_tp_holds_fewer_tokens_only_if_heads_are_held_twice(sizes):
    together = sizes.tokens * sizes.ranks
    copies = max(1, sizes.ranks // sizes.shape.kv_heads)
    assert budget(sizes).tp_tokens == (sizes.tokens + sizes.page) * sizes.ranks // copies - sizes.page
    assert (budget(sizes).tp_tokens < together) == (copies > 1)


@given(st.integers(120, 300), st.floats(0.5, 0.95))
def test_what_fits_leaves_the_rest_to_the_rest(gigabytes, fraction):
    """One token more would take from the share that mem_fraction leaves; more memory never holds less."""
    tokens = tokens_that_fit(LARGE, gigabytes * GB, fraction)
    assert tokens_that_fit(LARGE, (gigabytes + 1) * GB, fraction) > tokens
    assert tokens_that_fit(LARGE, gigabytes * GB, fraction + 0.01) > tokens
    found = parts(LARGE)
    before = sum(
        found[key] for key in ("experts.both", "spare expert slot.tp", "NCCL.both", "CUDA context, cuBLAS.both")
    )
    loaded = sum(
        found[key] for key in ("attention.ep", "embedding.ep", "norms, router, head.both", "rotary table.both")
    )
    shards = found["attention.tp"] + found["embedding.tp"]
    per_token = kv_token_bytes(LARGE.shape, 2) * (LARGE.shape.layers + 1) / LARGE.shape.layers  # with the spare slot
    static = loaded + shards + tokens * per_token
    assert static - 2 <= (gigabytes * GB - before) * fraction < static + per_token + 2


def test_requests_follow_sglangs_rule():
    assert requests_per_rank(32, 4096, 2048, 2) == 16
    assert requests_per_rank(None, 1000, 2048, 2) == 500
    assert requests_per_rank(None, 320_000, 40960, 8) == 4000
    assert requests_per_rank(None, 10**7, 40960, 8) == 4096


def test_the_papers_numbers():
    """Its 2.8 GB for Qwen3-235B on 8 ranks are GiB: TP's shards, a spare layer, and a layer of staging."""
    found = parts(replace(LARGE, transfer="collective"))
    assert found["attention.tp"] / GIB == pytest.approx(1.7, abs=0.05)
    slots = found["spare expert slot.tp"] + found["transfer scratch.tp"]
    assert slots / GIB == pytest.approx(1.1, abs=0.05)
    assert (found["attention.tp"] + slots) / GIB == pytest.approx(2.8, abs=0.05)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_direct_transfers_tables(ranks):
    """Against those that it really builds for one direction, from views that have no memory."""
    sizes = replace(LARGE, ranks=ranks, shape=replace(LARGE.shape, layers=2), tokens=1)
    arena = Arena(sizes.shape, ranks, torch.bfloat16, "meta")
    source, target = (dict(zip(("w13", "w2"), arena.experts(x, 0), strict=True)) for x in (Layout.EP, Layout.TP))
    own = strips(expert_blocks(sizes.shape, ranks, Layout.TP), 0, source, target)
    made = tables(own, ["w13", "w2"], 0, ranks, word=16, tile=2048)
    real = made.strips.nbytes + made.tiles.nbytes + 2 * sizes.shape.layers * 8 * (1 + ranks)
    with_tables = parts(sizes)["transfer tables (host).tp"]
    buffer = (
        8 * (sum(v.numel() for v in source.values()) // 2048 + 1 + 4 * ranks**2) + 288 * ranks**2 + 8192 * (1 + ranks)
    )
    assert (with_tables - buffer) / 2 == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"ranks": 3}, "ranks=3 does not divide experts=128"),
        ({"tokens": 0}, "tokens=0 must be at least 1"),
        ({"page": 64, "tokens": 100}, "tokens=100 is no multiple of page=64"),
        ({"device": "tpu"}, "device='tpu' is unknown"),
        ({"device": "cpu"}, "transfer='direct' needs device='cuda'"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        replace(LARGE, **changes)


# ---- the command


def run(*arguments: str):
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["budget", *arguments])


ON_H200 = ("--model", "Qwen3-235B-A22B", "--ranks", "8", "--gpu-memory", "150", "--mem-fraction", "0.85")


@pytest.mark.parametrize("model", PRESETS)
def test_the_table_fits_80_columns(model):
    memory = ("--gpu-memory", "192", "--mem-fraction", "0.85")  # a B200's: the largest fit on no 8 H200
    result = run("--model", model, "--ranks", "8", *memory, "--max-running-requests", "2048")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("spare expert slot") for line in lines)


def test_json_has_the_same_numbers():
    result = run(*ON_H200, "--json")
    told = json.loads(result.stdout)
    tokens = tokens_that_fit(LARGE, H200, 0.85)
    assert told["tokens"] == {"ep_per_rank": tokens, "ep": 8 * tokens, "tp": 4 * (tokens + 1) - 1}
    on_device = [part["nbytes"] for part in told["components"] if not part["host"]]
    assert told["total_bytes"] == sum(on_device) < H200


def test_a_checkpoints_folder_and_its_config_give_the_same(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["Qwen3-30B-A3B"]), encoding="utf-8")
    answers = {
        run("--model", str(path), "--ranks", "4", "--max-total-tokens", "1000").stdout
        for path in (tmp_path, tmp_path / "config.json", "Qwen3-30B-A3B")
    }
    assert len(answers) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--model", "nope", "--ranks", "8", "--max-total-tokens", "9"), "model='nope' is no folder or file"),
        (
            ("--model", "Qwen3-30B-A3B", "--ranks", "7", "--max-total-tokens", "9"),
            "ranks=7 does not divide experts=128",
        ),
        (ON_H200[:4], "give max_total_tokens, or gpu_memory and mem_fraction"),
        (ON_H200[:6], "give max_total_tokens, or gpu_memory and mem_fraction"),
        ((*ON_H200[:4], "--mem-fraction", "0.9"), "mem_fraction=0.9 needs gpu_memory"),
        ((*ON_H200[:6], "--mem-fraction", "1.5"), "mem_fraction=1.5 must lie between 0 and 1"),
        ((*ON_H200[:4], "--max-total-tokens", "0"), "max_total_tokens=0 must be at least 1"),
        ((*ON_H200, "--max-total-tokens", "400000"), "max_total_tokens=400000 does not fit: gpu_memory=150 GB"),
        ((*ON_H200[:4], "--gpu-memory", "80", "--max-total-tokens", "9000"), "GB do not fit into gpu_memory=80 GB"),
        ((*ON_H200[:2], "--ranks", "2", *ON_H200[4:]), "weights alone take 252.2 GB on each of 2 ranks"),
        ((*ON_H200, "--max-running-requests", "7"), "max_running_requests=7 leaves none to each of 8 ranks"),
        ((*ON_H200, "--context-length", "0"), "context=0 must be at least 1"),
        ((*ON_H200, "--dtype", "fp8"), "dtype='fp8' is unknown"),
    ],
)
def test_wrong_arguments_exit_2_with_one_line(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("text, message", [("[]", "no model's config.json"), ("{", "no model's config.json")])
def test_a_broken_config_is_named(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    result = run("--model", str(tmp_path), "--ranks", "2", "--max-total-tokens", "9")
    assert result.exit_code == 2 and message in result.stderr


def test_a_config_without_a_size_is_named(tmp_path):
    config = {name: value for name, value in PRESETS["Qwen3-30B-A3B"].items() if name != "hidden_size"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    result = run("--model", str(tmp_path), "--ranks", "2", "--max-total-tokens", "9")
    assert result.exit_code == 2 and "lacks 'hidden_size'" in result.stderr


def test_the_readme_shows_what_the_command_prints():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    shown = readme[readme.index("$ moebius-rollout budget ") :].partition("```")[0]
    command, table = shown.replace("\\\n", "").split("\n", 1)
    printed = run(*shlex.split(command)[3:]).output
    assert [line.rstrip() for line in printed.splitlines()] == table.rstrip().splitlines()
