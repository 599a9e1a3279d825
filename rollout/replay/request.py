"""What a dump holds: one line of JSON for each request that was answered."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field, NonNegativeInt

from moebius_engine.telemetry import Record

VERSION: Literal[1] = 1
# What shapes the draw of a token, and so costs time; what ends a response is not here, since its length is recorded.
SamplingName = Literal[
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"
]
_SAMPLING = frozenset(get_args(SamplingName))


class RecordedRequest(Record):
    """One request and its response. The response's length is that of `output_ids`."""

    version: Literal[1] = Field(description="of this schema; a reader of another version refuses it")
    step: int = Field(description="number of the rollout step in which it ended")
    number: NonNegativeInt = Field(description="counts the requests as they were sent; a replay keeps this order")
    request_id: str = Field(description="id under which it ran")
    prompt_ids: tuple[NonNegativeInt, ...] = Field(min_length=1, description="tokens sent [token ids]")
    output_ids: tuple[NonNegativeInt, ...] = Field(description="tokens received [token ids]")
    sampling: dict[SamplingName, int | float] = Field(description="SGLang's sampling parameters that were given")
    finish_reason: Literal["stop", "length", "abort"] = Field(description="why it ended")


def distribution(sampling: Mapping[str, Any]) -> dict[SamplingName, int | float]:
    """Those of SGLang's sampling parameters that a dump keeps; None is not given."""
    return {name: value for name, value in sampling.items() if name in _SAMPLING and value is not None}  # type: ignore[misc]
