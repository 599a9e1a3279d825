"""Reading a model's sizes, and which rank counts can hold it in both layouts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig

from moebius_engine.layout.shape import ModelShape, check_ranks

# Qwen3-235B-A22B, the paper's model: L=94, H=4096, I=1536, E=128, 64 query and 4 KV heads of 128.
PAPER = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def test_reads_a_checkpoints_config_and_a_written_one_alike():
    shape = ModelShape.from_hf_config(PAPER)
    assert (shape.layers, shape.hidden, shape.intermediate, shape.experts) == (94, 4096, 1536, 128)
    assert (shape.q_heads, shape.kv_heads, shape.head_dim, shape.vocab_size) == (64, 4, 128, 151936)
    assert ModelShape.from_hf_config(Qwen3MoeConfig(**PAPER).to_dict()) == shape


def test_head_dim_follows_from_hidden_size_where_it_is_missing():
    config = {key: value for key, value in PAPER.items() if key != "head_dim"}
    assert ModelShape.from_hf_config(config).head_dim == 4096 // 64


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "mixtral"}, r"model_type='mixtral' is not supported: use one of \['qwen3_moe'\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"mlp_only_layers": [0, 3]}, r"mlp_only_layers=\[0, 3\]"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config='fp8': .* use .* in bfloat16",
        ),
    ],
)
def test_models_without_a_rule_are_refused(change, text):
    with pytest.raises(ValueError, match=text):
        ModelShape.from_hf_config(PAPER | change)


@pytest.mark.parametrize(
    ("ranks", "change", "text"),
    [
        (1, {}, "ranks=1: two layouts need at least 2"),
        (3, {}, "ranks=3 does not divide experts=128"),
        (32, {"intermediate": 48}, r"divide intermediate=48; ranks that fit this model: \[2, 4, 8, 16\]"),
        (8, {"q_heads": 12}, "ranks=8 does not divide q_heads=12"),
        (8, {"kv_heads": 3}, "ranks=8 does not divide kv_heads=3"),
    ],
)
def test_ranks_that_do_not_divide_are_refused_with_both_numbers(ranks, change, text):
    with pytest.raises(ValueError, match=text):
        check_ranks(replace(ModelShape.from_hf_config(PAPER), **change), ranks)


@given(st.integers(2, 64), *(st.integers(1, 96) for _ in range(4)))
def test_check_ranks_accepts_exactly_what_divides(ranks, experts, intermediate, q_heads, kv_heads):
    shape = replace(
        ModelShape.from_hf_config(PAPER), experts=experts, intermediate=intermediate, q_heads=q_heads, kv_heads=kv_heads
    )
    cut = not any(size % ranks for size in (experts, intermediate, q_heads))
    fits = cut and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
    try:
        check_ranks(shape, ranks)
        assert fits
    except ValueError:
        assert not fits
