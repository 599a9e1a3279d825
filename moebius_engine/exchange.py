"""What all ranks say, on every rank, over gloo. A rank that has ended raises RuntimeError on the others."""

import pickle
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_SHORT = 1 << 17  # bytes that travel with the first collective: over gloo they take no longer than 8


def exchange(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's `mine`, in rank order; this rank's is the object itself. Collective.

    torch's all_gather_object also unpickles what this rank has sent, and takes four collectives on a gloo group. Here
    it is one as long as what each rank has to say is short, else two.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sent = np.frombuffer(pickle.dumps(mine, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)
    sizes_R, said_RB = _gather(len(sent), sent[:_SHORT], _SHORT, ranks, group)
    if (rest := int(sizes_R.max()) - _SHORT) > 0:
        _, rest_RB = _gather(0, sent[_SHORT:], rest, ranks, group)
        said_RB = np.concatenate([said_RB, rest_RB], axis=1)
    return [
        mine if other == rank else pickle.loads(said_RB[other, :size].data)
        for other, size in enumerate(sizes_R.tolist())
    ]


def _gather(size: int, sent_B: np.ndarray, room: int, ranks: int, group) -> tuple[np.ndarray, np.ndarray]:
    """A number and at most `room` bytes of every rank: (ranks,), (ranks, room)."""
    mine = np.empty(8 + room, np.uint8)
    mine[:8].view(np.int64)[0] = size
    mine[8 : 8 + len(sent_B)] = sent_B
    everyone = torch.empty(ranks * len(mine), dtype=torch.uint8)
    dist.all_gather_into_tensor(everyone, torch.from_numpy(mine), group=group)
    all_RB = everyone.numpy().reshape(ranks, -1)
    return all_RB[:, :8].copy().view(np.int64)[:, 0], all_RB[:, 8:]


def agree(reason: str | None, group: dist.ProcessGroup) -> str | None:
    """coordinator.Agree: this rank's reason against going on → all ranks' reasons joined, or None if no rank has one.
    Collective."""
    ranks = dist.get_world_size(group)
    flags = torch.empty(ranks, dtype=torch.int64)
    dist.all_gather_into_tensor(flags, torch.tensor([int(reason is not None)]), group=group)
    if not flags.any():
        return None
    reasons: list[Any] = [None] * ranks
    dist.all_gather_object(reasons, reason, group=group)
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text)
