"""Segments, and file descriptors that cross between mailboxes."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.layout import Layout
from moebius_engine.memory.arena import KV, WEIGHTS, Arena
from moebius_engine.memory.descriptors import Mailbox, send
from moebius_engine.memory.segments import SegmentTable
from tests.unit.transfer_cases import model_shape


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 5000)), max_size=12), st.sampled_from([1, 64, 4096]))
def test_segments_are_aligned_apart_and_found(wanted, granularity):
    table = SegmentTable(1 << 20, granularity)
    segments = [table.add(tag, nbytes) for tag, nbytes in wanted]
    end = 0
    for segment, (tag, nbytes) in zip(segments, wanted, strict=True):
        assert segment.offset == end and segment.offset % granularity == 0 and segment.nbytes >= nbytes
        end += segment.nbytes
        assert table.at(segment.offset) == table.at(end - 1) == segment
        assert segment in table.tagged([tag])
    assert table.used == end
    with pytest.raises(ValueError, match=f"offset {end} lies in no segment"):
        table.at(end)


def test_segments_that_do_not_fit_are_refused():
    table = SegmentTable(100, 10)
    table.add("weights", 85)
    with pytest.raises(ValueError, match="segment 'kv' of 20 bytes does not fit: 90 of 100 reserved bytes are used"):
        table.add("kv", 11)
    with pytest.raises(ValueError, match="of 0 bytes: at least 1"):
        table.add("kv", 0)
    with pytest.raises(ValueError, match=r"tags \['kv'\] name no segment: there are \['weights'\]"):
        table.tagged(["kv"])


def test_descriptors_cross_and_a_silent_rank_is_named():
    boxes = [Mailbox(rank, 0.2) for rank in range(3)]
    read, write = os.pipe()
    try:
        send({0: boxes[0].name}, 1, ["handle", None], [write], 1.0)
        got = boxes[0].receive([1])
        message, (copy,) = got[1]
        assert message == ["handle", None] and copy != write
        os.write(copy, b"through")
        assert os.read(read, 7) == b"through"
        os.close(copy)
        send({2: boxes[2].name}, 0, [], [], 1.0)
        with pytest.raises(TimeoutError, match=r"rank 2: no descriptors of ranks \[1\] within 0\.2 s"):
            boxes[2].receive([0, 1])
    finally:
        for descriptor in (read, write):
            os.close(descriptor)
        for box in boxes:
            box.close()


class PlainMemory:
    def __init__(self):
        self.tags: list[str] = []

    def take(self, tag, shape, dtype):
        self.tags.append(tag)
        return torch.empty(shape, dtype=dtype)


def test_an_arena_in_shared_memory_has_the_same_views_at_aligned_slots():
    """Layers of an odd number of elements still begin at multiples of 256 bytes from the segment's start."""
    shape, memory = model_shape(experts=2, intermediate=2, hidden=3, layers=3, kv_heads=1, head_dim=3), PlainMemory()
    shared, plain = (Arena(shape, 2, torch.bfloat16, "cpu", place) for place in (memory, None))
    for arena in (shared, plain):
        arena.allocate_kv(7, torch.float32)
    assert memory.tags == [WEIGHTS, WEIGHTS, KV, KV]
    for layout in Layout:
        assert shared.kv_rows(layout) == plain.kv_rows(layout)
        for layer in range(shape.layers):
            for views in (Arena.experts, Arena.kv):
                for mine, theirs in zip(views(shared, layout, layer), views(plain, layout, layer), strict=True):
                    assert mine.shape == theirs.shape and mine.is_contiguous()
    starts = [shared.experts(Layout.TP, layer)[0].data_ptr() for layer in range(shape.layers)]
    assert all((start - starts[0]) % 256 == 0 for start in starts)
