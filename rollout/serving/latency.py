"""Times to the first token and per output token, over a run and in bins of time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Response:
    """arrival_s: when its request was due. tokens_s: when each token came, never falling. Seconds since the start."""

    arrival_s: float
    tokens_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        """Time to the first token, from when the request was due: a late client counts against the server."""
        return self.tokens_s[0] - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None if there is none."""
        if len(self.tokens_s) == 1:
            return None
        return (self.tokens_s[-1] - self.tokens_s[0]) / (len(self.tokens_s) - 1)


@dataclass(frozen=True)
class Bin:
    """ttft_s: mean over requests that arrive in the bin. tpot_s: mean over tokens that come in it, but for first ones.
    None where there are none. As arXiv 2606.26607, section 6.2.
    """

    begin_s: float
    requests: int
    tokens: int
    ttft_s: float | None
    tpot_s: float | None


def in_bins(responses: Sequence[Response], width_s: float) -> list[Bin]:
    """Bins of width_s seconds from 0 to the last token. Raises ValueError for a width that is not above 0."""
    if not width_s > 0:
        raise ValueError(f"width_s={width_s}: above 0 seconds")
    times = np.concatenate([response.tokens_s for response in responses])
    # What a token took, by when it came; a first token took what no bin counts.
    took = np.concatenate([np.diff(response.tokens_s, prepend=np.nan) for response in responses])
    arrivals = np.array([response.arrival_s for response in responses])
    ttft = np.array([response.ttft_s for response in responses])
    of_token, of_request = (times // width_s).astype(int), (arrivals // width_s).astype(int)
    bins = []
    for number in range(of_token.max() + 1):
        requests, tokens = of_request == number, of_token == number
        later = took[tokens & ~np.isnan(took)]
        bins.append(
            Bin(
                begin_s=number * width_s,
                requests=int(requests.sum()),
                tokens=int(tokens.sum()),
                ttft_s=float(ttft[requests].mean()) if requests.any() else None,
                tpot_s=float(later.mean()) if later.size else None,
            )
        )
    return bins


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Mean, p50 and p99 of those that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {
        "mean": float(np.mean(known)),
        "p50": float(np.percentile(known, 50)),
        "p99": float(np.percentile(known, 99)),
    }
