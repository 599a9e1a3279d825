"""Who holds which KV heads in TP. With K < P each head is held by P / K consecutive ranks."""


def kv_heads_per_rank(kv_heads: int, ranks: int) -> int:
    """KV heads that each rank holds in TP."""
    return max(1, kv_heads // ranks)


def kv_heads_of_rank(kv_heads: int, ranks: int, rank: int) -> range:
    """The KV heads that a rank holds in TP."""
    first = rank * kv_heads // ranks
    return range(first, first + kv_heads_per_rank(kv_heads, ranks))


def holders_per_head(kv_heads: int, ranks: int) -> int:
    """Ranks that hold the same KV head in TP."""
    return max(1, ranks // kv_heads)
