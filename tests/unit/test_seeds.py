"""Seeded sampling on a CPU: the hash is upstream's, and draws follow the distribution."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.sglang.cpu.compute import murmur_hash32

WORD = 0xFFFFFFFF


def murmur(blocks: list[int]) -> int:
    """MurmurHash3, 32 bit, with seed 0, as published (Appleby, 2011)."""

    def rotated(word: int, bits: int) -> int:
        return (word << bits | word >> (32 - bits)) & WORD

    value = 0
    for block in blocks:
        block = rotated(block * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
        value = (rotated(value ^ block, 13) * 5 + 0xE6546B64) & WORD
    value ^= 4 * len(blocks)
    value = (value ^ value >> 16) * 0x85EBCA6B & WORD
    value = (value ^ value >> 13) * 0xC2B2AE35 & WORD
    return value ^ value >> 16


@given(
    st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=4),
    st.integers(1, 6),
)
def test_the_hash_is_murmur3_of_seed_position_and_column(rows, columns):
    seeds, positions = (torch.tensor(part) for part in zip(*rows, strict=True))
    found = murmur_hash32(None, seeds.to(torch.uint64), positions, torch.arange(columns))
    expected = [
        [murmur([seed & WORD, seed >> 32, position, column]) for column in range(columns)] for seed, position in rows
    ]
    assert found.tolist() == expected


def test_draws_follow_the_distribution(monkeypatch):
    from sglang.srt.layers import sampler

    upstream = sampler.murmur_hash32
    monkeypatch.setattr(sampler, "murmur_hash32", lambda *args: murmur_hash32(upstream, *args))
    shares = torch.tensor([0.5, 0.3, 0.2])
    draw = getattr(sampler.multinomial_with_seed, "_torchdynamo_orig_callable", sampler.multinomial_with_seed)
    drawn = draw(shares.log().expand(4000, 3), torch.arange(4000), torch.full((4000,), 7))
    counts = torch.bincount(drawn.view(-1), minlength=3) / 4000
    assert torch.allclose(counts, shares, atol=0.03)
