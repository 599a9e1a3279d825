"""Parameters that are not experts, moved into exportable memory, so that they sleep and wake with the experts."""

import torch

from moebius_engine.memory.arena import WEIGHTS
from moebius_engine.memory.exportable import Memory
from moebius_engine.sglang.shards import EXPERT_PARAMETERS

_ALIGNMENT = 256  # bytes, as torch aligns its allocations


def relocate(model: torch.nn.Module, memory: Memory, shared_with: torch.nn.Module | None = None) -> None:
    """Give every parameter a place in `memory`, with its content; call it before graphs are captured.

    Those that a parameter of `shared_with` provides already stay. Buffers stay too: no weight update would restore
    them after a sleep.
    """
    known = {parameter.data_ptr() for parameter in shared_with.parameters()} if shared_with is not None else set()
    moving = {
        parameter.data_ptr(): parameter.data
        for name, parameter in model.named_parameters()
        if not name.endswith(EXPERT_PARAMETERS) and parameter.data_ptr() not in known
    }
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in moving.values()]
    # One segment for all: the driver maps whole pages of 2 MB.
    places = memory.take(WEIGHTS, (sum(sizes),), torch.uint8).split(sizes)
    moved = {
        address: place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        for (address, tensor), place in zip(moving.items(), places, strict=True)
    }
    for parameter in model.parameters():
        if parameter.data_ptr() in moved:
            parameter.data = moved[parameter.data_ptr()]
