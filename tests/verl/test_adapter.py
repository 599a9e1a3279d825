"""The trainer's side of a weight update, without a server (with one: test_server.py)."""

import pytest
import torch

from rollout.verl_plugin.adapter import MoebiusAdapter, _Counted


async def test_changes_instead_of_tensors_are_refused_by_name():
    adapter = object.__new__(MoebiusAdapter)
    with pytest.raises(ValueError, match=r"wire_format='delta_flush': .* named_tensors only"):
        await adapter.update_weights(iter([]), wire_format="delta_flush")


async def test_tensors_are_counted_as_they_pass():
    pairs = [("a", torch.zeros(3, 4)), ("b", torch.zeros(5, dtype=torch.bfloat16))]
    counted = _Counted(iter(pairs))
    assert [name async for name, _ in counted.pairs()] == ["a", "b"]
    assert (counted.tensors, counted.bytes) == (2, 3 * 4 * 4 + 5 * 2)
