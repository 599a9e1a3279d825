"""The tables that the copy kernel reads, carried out by numpy as the kernel would, against transfer/local.py."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.layout import Layout
from moebius_engine.layout.plan import Block, expert_blocks, kv_blocks
from moebius_engine.transfer.local import move_locally
from moebius_engine.transfer.order import Extent, check_order
from moebius_engine.transfer.strips import strips, word_size
from moebius_engine.transfer.tables import LARGEST, divider, tables
from tests.unit.transfer_cases import cut_experts, expert_cases, kv_cases, model_shape, other, random_experts

TENSORS = ("w13", "w2", "k", "v")


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(-1).view(torch.uint8).numpy()


def emulate(blocks, sources, destinations, tile: int) -> None:
    """Every rank's tiles, in the order of copy.cu: the same numbers, in numpy instead of threads."""
    for rank, source in enumerate(sources):
        own = strips(blocks, rank, source, destinations[rank])
        word = word_size(own, [0])
        names = [name for name in TENSORS if name in source]
        made = tables(own, names, rank, len(sources), word, tile)
        assert sum(made.counts) == len(made.tiles)
        first = 0
        for name, count in zip(names, made.counts, strict=True):
            for at in made.tiles[first : first + count]:
                strip = made.strips[at["strip"]]
                rows = own[at["strip"]]
                units = np.arange(at["unit"], min(at["unit"] + tile, strip["units"]), dtype=np.uint64)
                chunks = ((units * strip["magic"] >> np.uint64(32)) + units) >> np.uint64(strip["shift"])
                inner = (units - chunks * np.uint64(strip["units_per_chunk"])) * np.uint64(word)

                def place(end, listed, chunks=chunks, strip=strip, inner=inner):
                    row = chunks if listed is None else listed.numpy()[chunks.astype(np.int64)].astype(np.uint64)
                    return strip[f"{end}_offset"] + row * strip[f"{end}_pitch"] + inner

                read, written = place("source", rows.source_rows), place("destination", rows.destination_rows)
                to = bytes_of(destinations[strip["destination"]][name])
                for byte in range(word):
                    to[written + np.uint64(byte)] = bytes_of(source[name])[read + np.uint64(byte)]
            first += count


def same(left, right) -> bool:
    return all(torch.equal(a[name], b[name]) for a, b in zip(left, right, strict=True) for name in b)


def blank(tensors):
    return [{name: torch.full_like(tensor, -1) for name, tensor in rank.items()} for rank in tensors]


@pytest.mark.parametrize("target", Layout)
@given(case=expert_cases(), tile=st.sampled_from([1, 3, 8, 64]), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_experts_by_tables_equal_the_plan(target, case, tile, dtype):
    shape, ranks = case
    full = {name: tensor.to(dtype) for name, tensor in random_experts(shape).items()}
    blocks, sources = expert_blocks(shape, ranks, target), cut_experts(full, other(target), ranks)
    expected, arrived = blank(cut_experts(full, target, ranks)), blank(cut_experts(full, target, ranks))
    move_locally(blocks, sources, expected)
    emulate(blocks, sources, arrived, tile)
    assert same(arrived, expected)
    assert same(arrived, cut_experts(full, target, ranks))


@pytest.mark.parametrize("target", Layout)
@given(case=kv_cases(), tile=st.sampled_from([1, 5, 32]))
def test_kv_by_tables_equals_the_plan(target, case, tile):
    blocks = kv_blocks(case.shape, case.ranks, target, case.moves())
    arrived = case.pools(target, filled=False)
    emulate(blocks, case.pools(other(target), filled=True), arrived, tile)
    assert same(arrived, case.pools(target, filled=True))


def test_a_broken_block_is_seen():
    """Control: with one block read from its neighbour's place, the comparison above fails."""
    shape, ranks = model_shape(), 2
    full = random_experts(shape)
    blocks, sources = expert_blocks(shape, ranks, Layout.TP), cut_experts(full, Layout.EP, ranks)
    blocks[0] = blocks[0]._replace(source_index=blocks[1].source_index)
    arrived = blank(cut_experts(full, Layout.TP, ranks))
    emulate(blocks, sources, arrived, 8)
    assert not same(arrived, cut_experts(full, Layout.TP, ranks))


@given(st.integers(1, LARGEST), st.lists(st.integers(0, LARGEST - 1), min_size=1))
def test_the_divider_divides(by, numbers):
    magic, shift = divider(by)
    assert 0 <= magic < 2**32 and shift < 32
    for n in [*numbers, LARGEST - 1, by - 1, min(by, LARGEST - 1)]:
        assert (n * magic >> 32) + n < 2**32
        assert ((n * magic >> 32) + n) >> shift == n // by


def test_tiles_of_all_peers_alternate():
    """At any point of a tensor's tiles, every peer has had its share; each rank begins with the peer after it."""
    shape, ranks = model_shape(experts=8, intermediate=64, hidden=64), 4
    sources = cut_experts(random_experts(shape), Layout.EP, ranks)
    targets = cut_experts(random_experts(shape), Layout.TP, ranks)
    for rank in range(ranks):
        own = strips(expert_blocks(shape, ranks, Layout.TP), rank, sources[rank], targets[rank])
        made = tables(own, ["w13", "w2"], rank, ranks, 16, 64)
        peers = made.strips["destination"][made.tiles["strip"][: made.counts[0]]]
        assert peers[0] == (rank + 1) % ranks
        for start in range(0, len(peers), 2 * ranks):  # gate and up
            assert sorted(peers[start : start + 2 * ranks]) == sorted([*range(ranks)] * 2)


def test_words_are_as_wide_as_alignment_allows():
    sources, targets = [{"x": torch.zeros(4, 24, dtype=torch.int16)} for _ in range(2)]
    for start, width, expected in [(0, 8, 16), (4, 4, 8), (2, 2, 4), (1, 1, 2)]:
        block = Block(0, 1, "x", (slice(None), slice(start, start + width)), (slice(None), slice(0, width)), (4, width))
        assert word_size(strips([block], 0, sources, targets), [0, 64]) == expected
    assert word_size([], [64, 8]) == 8


def test_errors_name_what_is_wrong():
    x = {"x": torch.zeros(4, 6, 8)}
    rows = torch.tensor([0, 2])
    with pytest.raises(ValueError, match="the sender must know its destination rows"):
        strips([Block(0, 1, "x", (rows, slice(0, 6)), None, (2, 6, 8))], 0, x, x)
    with pytest.raises(ValueError, match=r"the block is \(4, 3, 8\), its source index cuts out \(4, 2, 8\)"):
        strips([Block(0, 1, "x", (slice(None), slice(0, 2)), (slice(None), slice(0, 3)), (4, 3, 8))], 0, x, x)
    with pytest.raises(ValueError, match="no strip of equal chunks"):
        index = (slice(None), slice(0, 3), slice(0, 4))
        strips([Block(0, 1, "x", index, index, (4, 3, 4))], 0, x, x)
    with pytest.raises(ValueError, match=r"from torch\.float32 to torch\.int32"):
        strips([Block(0, 1, "x", (slice(None),), (slice(None),), (4, 6, 8))], 0, x, {"x": x["x"].int()})


def test_layers_may_only_overwrite_what_a_fence_has_freed():
    slots = [Extent(100 * i, 100 * i + 100) for i in range(5)]
    check_order(slots[1:], slots[:-1], 1)  # EP to TP: slot i + 1 into slot i, forwards
    check_order(slots[:-1][::-1], slots[1:][::-1], 1)
    with pytest.raises(ValueError, match="phase 0 writes memory that phase 1 reads"):
        check_order(slots[:-1], slots[1:], 1)  # the wrong way round
    with pytest.raises(ValueError, match="phase 0 writes memory that phase 0 reads"):
        check_order(slots[:1], slots[:1], 1)
    with pytest.raises(ValueError, match="phase 1 writes memory that phase 0 reads: only what phases up to -1 read"):
        check_order(slots[1:], slots[:-1], 2)  # the fence of one tensor says nothing about the other's memory
