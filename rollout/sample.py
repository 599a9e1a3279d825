"""One response of a batch, and the sampling parameters of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Sampling = Mapping[str, Any]
"""SGLang's sampling parameters."""


@dataclass(frozen=True)
class Sample:
    """One response. `finish_reason` is SGLang's: {"type": "stop" | "length" | "abort", ...}; a row that was refused
    has type "abort", a "message" and "status_code" 400, and no tokens."""

    request_id: str
    output_ids: list[int]
    logprobs: list[float]  # of output_ids, under the weights that drew them
    finish_reason: dict[str, Any]
    weight_version_begin: int  # weight sets received when an engine was asked for its first tokens
    weight_version_end: int  # the same when it ended; differs only if an engine died under it, and an update came then
    resumed: int = 0  # engines that died under it
    # of each engine's part of output_ids, when it was asked for; more than one where a part of a dead engine was kept
    weight_versions: tuple[int, ...] = ()


def per_sample(sampling: Sampling | Sequence[Sampling] | None, count: int) -> list[Sampling]:
    """The parameters of `count` samples, of which one mapping is for all. With a sampling_seed, sample i gets it + i.

    Raises ValueError for another number of mappings, or an "n" in the one for all.
    """
    if sampling is not None and not isinstance(sampling, Mapping):
        if len(sampling) != count:
            raise ValueError(f"sampling has {len(sampling)} entries for {count} samples; give one for each, or one")
        return list(sampling)
    sampling = sampling or {}
    if "n" in sampling:
        raise ValueError(f"sampling must not hold 'n' (got {sampling['n']}): give it as the argument n")
    seed = sampling.get("sampling_seed")
    if seed is None:
        return [sampling] * count
    return [{**sampling, "sampling_seed": seed + index} for index in range(count)]
