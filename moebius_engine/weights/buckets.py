"""A weight update in pieces of bounded size."""

from collections.abc import Iterable

import torch

NamedTensors = Iterable[tuple[str, torch.Tensor]]

_BUCKET_BYTES = 512 << 20


def buckets(named_tensors: NamedTensors) -> Iterable[list[tuple[str, torch.Tensor]]]:
    """Split an update into buckets of 512 MiB or less; a larger tensor is a bucket of its own."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
