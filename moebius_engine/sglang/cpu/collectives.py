"""Collectives that SGLang registers for CUDA only, on gloo."""

import torch
import torch.distributed as dist


def all_gather_into_tensor(original, self, output, input):
    if not input.is_cpu:
        return original(self, output, input)
    dist.all_gather_into_tensor(output, input.contiguous(), group=self.device_group)
    return None


def reduce_scatter_tensor(original, self, output, input):
    if not input.is_cpu:
        return original(self, output, input)
    output.copy_(_own_rows(self, input, None))
    return None


def reduce_scatterv(original, self, input_, output=None, sizes=None):
    if not input_.is_cpu:
        return original(self, input_, output, sizes)
    rows = _own_rows(self, input_, sizes)
    if output is None:
        return rows.contiguous()
    output.copy_(rows)
    return output


def _own_rows(group, input_: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
    """Sum over ranks, then this rank's rows: gloo has no uneven reduce-scatter."""
    if sizes is None:
        sizes = [input_.shape[0] // group.world_size] * group.world_size
    summed = input_.clone()
    dist.all_reduce(summed, group=group.device_group)
    start = sum(sizes[: group.rank_in_group])
    return summed[start : start + sizes[group.rank_in_group]]
