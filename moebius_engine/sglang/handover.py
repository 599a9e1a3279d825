"""Who holds which request after a switch: the union of EP's ranks for TP, a partition of it for EP."""

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from sglang.srt.managers.schedule_batch import Req

from moebius_engine.layout.partition import Capacity, partition, spread
from moebius_engine.sglang import requests
from moebius_engine.sglang.roster import Roster


@dataclass
class Handover:
    """This rank's requests in the target layout, and where everyone's KV goes.

    held: per destination rank (one for TP, where all ranks get the same) the requests with KV and the EP rank that
    owns them, or will. retracted: requests whose KV no EP rank can hold; they are recomputed from their tokens.
    """

    roster: Roster
    held: list[list[tuple[Req, int]]]
    new_token_ratio: float
    retracted: list[Req] = field(default_factory=list)


def gather(roster: Roster, ratio: float, tokenizer, group: dist.ProcessGroup) -> Handover:
    """EP → TP: every rank gets the union, in one order. Collective; only other ranks' requests are copied."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    mine: dict[str, Any] = {
        "running": requests.pack(roster.running),
        "prefilling": requests.pack(roster.prefilling),
        "waiting": requests.pack(roster.waiting),
        "penalties": roster.penalties,
        "ratio": ratio,
    }
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, mine, group=group)

    def of(owner: int, state: str) -> list[Req]:
        if owner == rank:
            return getattr(roster, state)
        return requests.unpack(everyone[owner][state], tokenizer)

    running = [(req, owner) for owner in range(ranks) for req in of(owner, "running")]
    prefilling = [(req, owner) for owner in range(ranks) for req in of(owner, "prefilling")]
    # Waiting requests take turns by rank, so that nobody's queue goes before another's.
    turns = zip_longest(*(of(owner, "waiting") for owner in range(ranks)))
    union = Roster(
        running=[req for req, _ in running],
        prefilling=[req for req, _ in prefilling],
        waiting=[req for turn in turns for req in turn if req is not None],
        penalties={rid: state for rank_ in everyone for rid, state in rank_["penalties"].items()},
    )
    return Handover(union, [running + prefilling], max(entry["ratio"] for entry in everyone))


def divide(roster: Roster, ratio: float, rank: int, ranks: int, capacity: Capacity, page_size: int) -> Handover:
    """TP → EP: every rank holds the union and computes the same partition, so nothing is exchanged."""
    held = roster.held
    # Whole pages and one more for the next token, so that what lands can go on.
    sizes = [(-(-req.kv_committed_len // page_size) + 1) * page_size for req in held]
    parts = partition(sizes, ranks, capacity)
    retracted = [held[index] for index in sorted(parts.overflow)]
    waiting = retracted + roster.waiting
    owners = spread(len(waiting), [len(part) for part in parts.ranks])
    decoding = {id(req) for req in roster.running}
    mine = [held[index] for index in sorted(parts.ranks[rank])]
    return Handover(
        Roster(
            running=[req for req in mine if id(req) in decoding],
            prefilling=[req for req in mine if id(req) not in decoding],
            waiting=[req for req, owner in zip(waiting, owners, strict=True) if owner == rank],
            penalties=roster.penalties,
        ),
        [[(held[index], owner) for index in sorted(part)] for owner, part in enumerate(parts.ranks)],
        ratio,
        retracted,
    )
