"""Who holds which request after a switch: the union of EP's ranks for TP, a partition of it for EP."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from sglang.srt.managers.schedule_batch import Req

from moebius_engine.exchange import exchange
from moebius_engine.layout.partition import Capacity, partition, spread
from moebius_engine.sglang import requests
from moebius_engine.sglang.placement import Held
from moebius_engine.sglang.roster import Roster

_STATES = ("running", "prefilling", "waiting")


@dataclass
class Handover:
    """This rank's requests in the target layout, and where everyone's KV goes.

    held: per destination rank (one for TP, where all ranks get the same) the requests with KV. retracted: requests
    whose KV no EP rank can hold; they are recomputed from their tokens.
    """

    roster: Roster
    held: list[list[Held]]
    new_token_ratio: float
    retracted: list[Req] = field(default_factory=list)


def say(roster: Roster, ratio: float) -> Any:
    """This rank's part of `share`."""
    try:
        return {state: requests.pack(getattr(roster, state)) for state in _STATES}, roster.penalties, ratio
    except Exception as error:
        return RuntimeError(f"requests cannot be packed: {error!r}")


def share(roster: Roster, ratio: float, group: dist.ProcessGroup) -> list[Any]:
    """EP → TP: what every rank says of its requests, in rank order. Collective. A rank that cannot pack its requests
    still takes part: it sends the exception, which `gather` raises."""
    return exchange(say(roster, ratio), group)


def gather(roster: Roster, everyone: Sequence[Any], rank: int, tokenizer) -> Handover:
    """EP → TP: every rank gets the union, in one order. everyone: of `share`; only other ranks' requests are copied.

    Raises what kept a rank from sharing.
    """
    for said in everyone:
        if isinstance(said, Exception):
            raise said
    reqs = [
        {s: getattr(roster, s) if owner == rank else requests.unpack(packed[s], tokenizer) for s in packed}
        for owner, (packed, _, _) in enumerate(everyone)
    ]
    held = {
        state: [
            Held(req, owner, (owner, state, group_))
            for owner, (packed, _, _) in enumerate(everyone)
            for req, group_ in zip(reqs[owner][state], packed[state].groups if packed[state] else (), strict=True)
        ]
        for state in ("running", "prefilling")
    }
    # Waiting requests take turns by rank, so that nobody's queue goes before another's.
    turns = zip_longest(*(by_state["waiting"] for by_state in reqs))
    union = Roster(
        running=[entry.req for entry in held["running"]],
        prefilling=[entry.req for entry in held["prefilling"]],
        waiting=[req for turn in turns for req in turn if req is not None],
        penalties={rid: state for _, penalties, _ in everyone for rid, state in penalties.items()},
    )
    return Handover(union, [held["running"] + held["prefilling"]], max(ratio_ for _, _, ratio_ in everyone))


def divide(roster: Roster, ratio: float, rank: int, ranks: int, capacity: Capacity, page_size: int) -> Handover:
    """TP → EP: every rank holds the union and computes the same partition, so nothing is exchanged."""
    held = roster.held
    sizes = [req.kv_committed_len for req in roster.running] + [prompt_tokens(req) for req in roster.prefilling]
    # Whole pages and one more for the next token, so that what lands can go on.
    sizes = [(-(-size // page_size) + 1) * page_size for size in sizes]
    parts = partition(sizes, ranks, capacity)
    retracted = [held[index] for index in sorted(parts.overflow)]
    waiting = retracted + roster.waiting
    owners = spread(len(waiting), [len(part) for part in parts.ranks])
    decoding = {id(req) for req in roster.running}
    mine = [held[index] for index in sorted(parts.ranks[rank])]
    groups = requests.prefix_groups(held)
    return Handover(
        Roster(
            running=[req for req in mine if id(req) in decoding],
            prefilling=[req for req in mine if id(req) not in decoding],
            waiting=[req for req, owner in zip(waiting, owners, strict=True) if owner == rank],
            penalties=roster.penalties,
        ),
        [[Held(held[index], owner, groups[index]) for index in sorted(part)] for owner, part in enumerate(parts.ranks)],
        ratio,
        retracted,
    )


def rows_to_fill(prefilling: Sequence[Req], page_size: int) -> int:
    """KV rows that half-prefilled requests will still take, in whole pages."""
    ends = [(req.kv_committed_len, prompt_tokens(req)) for req in prefilling]
    return sum((-(-last // page_size) - -(-first // page_size)) * page_size for first, last in ends)


def prompt_tokens(req: Req) -> int:
    """Tokens of a half-prefilled request when it is filled: SGLang takes rows for the rest without asking again."""
    return len(req.origin_input_ids) + len(req.output_ids)
