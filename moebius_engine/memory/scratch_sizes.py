"""How much device memory a switch computes in (scratch.py): pure arithmetic."""

_ROW_TENSORS = 8  # int64 tensors of all moved tokens that are alive at once (sglang/kv_rows.py), generously
_STEP_BYTES = 20 << 20

SMALL_BYTES, SMALL_TENSORS = 1 << 20, 8  # torch's allocator keeps tensors below 1 MiB apart from larger ones


def large_bytes(tokens: int) -> int:
    """Of the part for large tensors. tokens: KV tokens of all ranks."""
    return max(1, -(-_ROW_TENSORS * 8 * tokens // _STEP_BYTES)) * _STEP_BYTES


def scratch_bytes(tokens: int) -> int:
    """Of all of it, on two streams: what is large is computed on one of them."""
    return large_bytes(tokens) + 2 * SMALL_BYTES * SMALL_TENSORS
