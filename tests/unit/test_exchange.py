"""What ranks tell each other arrives whole, however long it is, over real gloo."""

import pytest
import torch.distributed as dist

from moebius_engine.exchange import _SHORT, exchange
from tests.unit.ranks import run_ranks


def said(rank: int, lengths: tuple[int, ...]) -> bytes:
    return bytes((rank + index) % 251 for index in range(lengths[rank]))


def run_rank(rank: int, cases: list[tuple[int, ...]]) -> None:
    for lengths in cases:
        mine = said(rank, lengths)
        everyone = exchange(mine, dist.group.WORLD)
        assert everyone == [said(other, lengths) for other in range(2)]
        assert everyone[rank] is mine


@pytest.mark.timeout(120)
def test_short_long_and_uneven_messages_arrive(tmp_path):
    edge = _SHORT - 32  # near the length from which a second collective is needed, pickle's own bytes included
    cases = [(0, 0), (5, 7), (3, 3 * _SHORT), *((edge + step, 1) for step in range(0, 64, 4))]
    run_ranks(run_rank, 2, tmp_path, cases)
