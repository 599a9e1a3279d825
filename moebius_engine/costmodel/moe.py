"""A mixture-of-experts model, as far as its costs depend on it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moebius_engine.layout.shape import ModelShape
from moebius_engine.memory.budget import ITEMSIZE


@dataclass(frozen=True)
class MoeModel:
    """top_k: experts a token is sent to. itemsize: bytes of an element of weights, activations and KV."""

    shape: ModelShape
    top_k: int
    itemsize: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.shape.experts:
            raise ValueError(f"top_k={self.top_k} must lie between 1 and experts={self.shape.experts}")

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> "MoeModel":
        """Read a Hugging Face config. Raises ValueError as ModelShape does, or for an unknown dtype or no top-k."""
        dtype = config.get("dtype") or config.get("torch_dtype")
        if dtype not in ITEMSIZE:
            raise ValueError(f"dtype={dtype!r} is unknown; use one of {list(ITEMSIZE)}")
        if "num_experts_per_tok" not in config:
            raise ValueError("the config lacks num_experts_per_tok, the experts that a token is sent to")
        return cls(ModelShape.from_hf_config(config), config["num_experts_per_tok"], ITEMSIZE[dtype])

    def activated_experts(self, tokens: float) -> float:
        """Distinct experts of one layer that `tokens` tokens are sent to, expected if routing is uniform.

        A token misses an expert with probability 1 - k/E, and all of n tokens miss it with (1 - k/E)^n, so of E experts
        E (1 - (1 - k/E)^n) are hit.
        """
        experts = self.shape.experts
        return experts * (1 - (1 - self.top_k / experts) ** tokens)
