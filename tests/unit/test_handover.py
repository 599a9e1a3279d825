"""Who takes over which request when EP takes over from TP."""

from types import SimpleNamespace

import pytest

from moebius_engine.layout.partition import Capacity
from moebius_engine.sglang.handover import divide
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
