"""What an engine has room for."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from moebius_engine.layout import Layout

# SGLang 0.5.12 keeps this many tokens free for each running request before it admits another one, once its estimate has
# settled: CLIP_MAX_NEW_TOKENS 4096 * init_new_token_ratio 0.7 * min_new_token_ratio_factor 0.14.
RESERVE_TOKENS = 401


@dataclass(frozen=True)
class Limits:
    """What an engine holds, over all of its ranks.

    running: requests being decoded. prefill_tokens: of one prefill, by layout. kv_tokens: by layout. reserve_tokens:
    kept free for each running request when another one is admitted.
    """

    running: int
    prefill_tokens: Mapping[Layout, int]
    kv_tokens: Mapping[Layout, int] = field(default_factory=lambda: dict.fromkeys(Layout, sys.maxsize))
    reserve_tokens: int = RESERVE_TOKENS

    def __post_init__(self) -> None:
        if self.running < 1:
            raise ValueError(f"running={self.running}: at least 1 request")
        if self.reserve_tokens < 0:
            raise ValueError(f"reserve_tokens={self.reserve_tokens}: 0 tokens or more")
        for name in ("prefill_tokens", "kv_tokens"):
            values = getattr(self, name)
            if set(values) != set(Layout) or min(values.values()) < 1:
                raise ValueError(f"{name}={dict(values)}: at least 1 token for each of {[str(x) for x in Layout]}")
