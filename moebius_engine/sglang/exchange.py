"""What all ranks say, on every rank, over gloo. A rank that has ended raises RuntimeError on the others."""

import pickle
from typing import Any

import torch
import torch.distributed as dist


def exchange(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's `mine`, in rank order; this rank's is the object itself. Collective.

    torch's all_gather_object also unpickles what this rank has sent, and takes four collectives on a gloo group.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sent = torch.frombuffer(bytearray(pickle.dumps(mine, protocol=pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)
    sizes = torch.empty(ranks, dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(sent)]), group=group)
    longest = int(sizes.max())
    everyone = torch.empty(ranks, longest, dtype=torch.uint8)
    dist.all_gather_into_tensor(everyone.view(-1), torch.nn.functional.pad(sent, (0, longest - len(sent))), group=group)
    received = zip(everyone.numpy(), sizes.tolist(), strict=True)
    return [mine if other == rank else pickle.loads(data[:size].data) for other, (data, size) in enumerate(received)]


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
