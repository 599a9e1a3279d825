"""Who takes over which request when EP takes over from TP."""

from types import SimpleNamespace

import pytest

from moebius_engine.layout.partition import Capacity
from moebius_engine.sglang.handover import divide, rows_to_fill
from moebius_engine.sglang.roster import Roster


def request(name: str, filled: int, prompt: int, output: int = 0):
    return SimpleNamespace(
        rid=name,
        kv_committed_len=filled,
        origin_input_ids=[1] * prompt,
        output_ids=[1] * output,
        last_node=None,
        cache_protected_len=0,
    )


@pytest.mark.parametrize(("rows", "kept"), [(100, ["long", "half"]), (99, ["long"])])
def test_a_half_prefilled_request_needs_room_for_its_whole_prompt(rows, kept):
    """SGLang takes rows for the rest of a chunked prompt without asking: it once ended with 'Out of memory'."""
    long, half = request("long", filled=58, prompt=50, output=9), request("half", filled=10, prompt=40)
    given = divide(Roster(running=[long], prefilling=[half]), 0.5, 0, 1, Capacity(8, rows), page_size=1)
    assert [entry.req.rid for entry in given.held[0]] == kept
    assert [req.rid for req in given.retracted] == [name for name in ("half",) if name not in kept]


def test_the_rest_of_a_prompt_takes_whole_pages():
    """16 of 33 tokens have KV: the rest needs two pages, although it is only 17 tokens."""
    half, full = request("half", filled=16, prompt=30, output=3), request("full", filled=20, prompt=32)
    assert rows_to_fill([half], page_size=16) == 32
    assert rows_to_fill([full], page_size=16) == 0  # its last page has room
    assert rows_to_fill([half, full], page_size=1) == 17 + 12
