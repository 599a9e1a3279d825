"""The CPU platform's page allocation: rows of a page stand together, and no row is given twice."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

from moebius_engine.sglang.cpu import paging

PAGE, ROWS = 4, 64


def extend(allocator, rows: list[list[int]], chunks: list[int]) -> bool:
    """Give each request `chunks` more tokens; False if they do not fit."""
    prefixes = torch.tensor([len(own) for own in rows])
    lengths = prefixes + torch.tensor(chunks)
    last = torch.tensor([own[-1] if own else -1 for own in rows])
    new = paging.alloc_extend(None, allocator, prefixes, prefixes, lengths, lengths, last, sum(chunks))
    if new is None:
        return False
    for own, part in zip(rows, new.split(chunks), strict=True):
        own += part.tolist()
    return True


@given(st.data())
def test_rows_are_unique_and_stand_in_pages(data):
    allocator = PagedTokenToKVPoolAllocator(ROWS, PAGE, torch.float32, "cpu", None, False)
    rows: list[list[int]] = [[] for _ in range(data.draw(st.integers(1, 4)))]
    chunks = [data.draw(st.integers(1, 9)) for _ in rows]
    assert extend(allocator, rows, chunks)
    for _ in range(data.draw(st.integers(0, 12))):
        free = allocator.available_size()
        if data.draw(st.booleans()):
            more = [data.draw(st.integers(1, 9)) for _ in rows]
            needed = sum(
                -(-(len(own) + new) // PAGE) - -(-len(own) // PAGE) for own, new in zip(rows, more, strict=True)
            )
            fits = extend(allocator, rows, more)
        else:
            lengths = torch.tensor([len(own) + 1 for own in rows])
            needed = sum(len(own) % PAGE == 0 for own in rows)
            new = paging.alloc_decode(None, allocator, lengths, lengths, torch.tensor([own[-1] for own in rows]))
            fits = new is not None
            if fits:
                for own, row in zip(rows, new.tolist(), strict=True):
                    own.append(row)
        assert fits == (needed * PAGE <= free)
        assert allocator.available_size() == free - (needed * PAGE if fits else 0)
        taken = [row for own in rows for row in own]
        assert len(set(taken)) == len(taken) and min(taken) >= PAGE, "page 0 is for padding"
        for own in rows:
            assert all(row % PAGE == position % PAGE for position, row in enumerate(own))
            assert all(own[first] + 1 == own[first + 1] for first in range(len(own) - 1) if (first + 1) % PAGE)
