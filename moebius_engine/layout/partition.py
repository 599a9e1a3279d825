"""Which EP rank gets which request when TP is left. Deterministic, so that every rank computes the same."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Capacity:
    """What one EP rank holds: requests with KV, and KV tokens."""

    requests: int
    tokens: int


@dataclass(frozen=True)
class Partition:
    """Indices of the requests that each rank gets, and of those that no rank can hold."""

    ranks: list[list[int]]
    overflow: list[int]


def partition(tokens: Sequence[int], ranks: int, capacity: Capacity) -> Partition:
    """Longest first onto the least loaded rank, where load counts requests and tokens alike.

    tokens: KV tokens of each request. A request's weight is its share of the tokens plus its share of the count, so
    that neither many short requests nor few long ones gather on a rank. This is Graham's longest-processing-time rule:
    as long as nothing overflows, the most loaded rank has at most 4/3 - 1/(3P) of the best possible maximum
    (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969).

    A request that does not fit onto the least loaded rank is tried on the next; one that fits nowhere overflows.
    """
    total, count = max(1, sum(tokens)), max(1, len(tokens))
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    overflow: list[int] = []
    loads: list[tuple[float, int]] = [(0.0, rank) for rank in range(ranks)]
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        passed_over = []
        while loads:
            load, rank = heapq.heappop(loads)
            if len(chosen[rank]) < capacity.requests and held[rank] + tokens[index] <= capacity.tokens:
                chosen[rank].append(index)
                held[rank] += tokens[index]
                heapq.heappush(loads, (load + tokens[index] / total + 1 / count, rank))
                break
            passed_over.append((load, rank))
        else:
            overflow.append(index)
        for entry in passed_over:
            heapq.heappush(loads, entry)
    return Partition(chosen, overflow)


def spread(count: int, held: Sequence[int]) -> list[int]:
    """Ranks for `count` requests without KV: each goes to the rank that holds the fewest requests so far.

    held: requests that each rank has. Returns the rank of each request.
    """
    loads = [(load, rank) for rank, load in enumerate(held)]
    heapq.heapify(loads)
    ranks = []
    for _ in range(count):
        load, rank = loads[0]
        ranks.append(rank)
        heapq.heapreplace(loads, (load + 1, rank))
    return ranks
