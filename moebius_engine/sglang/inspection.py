"""Looking at what is really in memory: digests of weights, addresses of what a captured graph would hold."""

import hashlib

import torch


def digest(tensor: torch.Tensor) -> str:
    """Digest of a tensor's bytes (not of its strides)."""
    raw = tensor.detach().contiguous().cpu().view(torch.uint8)
    return hashlib.blake2b(raw.numpy().tobytes(), digest_size=16).hexdigest()


def weight_digests(model: torch.nn.Module) -> dict[str, tuple[str, int]]:
    """Name → (digest, bytes) of every parameter of a rank's live module tree."""
    return {name: (digest(parameter), parameter.data.nbytes) for name, parameter in model.named_parameters()}


def addresses(scheduler) -> dict[str, int]:
    """Name → data_ptr of every parameter and KV buffer of both layouts."""
    found: dict[str, int] = {}
    for layout, state in scheduler.layouts.items():
        for name, parameter in state.runner.model.named_parameters():
            found[f"{layout.value}.{name}"] = parameter.data_ptr()
        pool = state.runner.token_to_kv_pool
        for kind, buffers in (("k", pool.k_buffer), ("v", pool.v_buffer)):
            for layer, buffer in enumerate(buffers):
                found[f"{layout.value}.{kind}.{layer}"] = buffer.data_ptr()
    return found
