"""What is simulated: when requests arrive, and how long their prompts and responses are."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moebius_engine.telemetry import read_json_lines
from rollout.demo import NORMAL_P99, PAPER_CAP, PAPER_MEDIAN, PAPER_P99
from rollout.replay.request import RecordedRequest

# DeepMath on Qwen3-235B (arXiv 2606.26607, section 6.3): nine steps of 2,048 prompts with a median of 120 tokens and a
# maximum of 1,352. The spread puts that maximum where the largest of 18,432 draws is expected.
PAPER_STEPS, PAPER_REQUESTS = 9, 2048
PROMPT_MEDIAN, PROMPT_MAX = 120, 1352
PROMPT_SIGMA = math.log(PROMPT_MAX / PROMPT_MEDIAN) / 3.87

# The bursty trace (section 6.2): 3,107 requests, bursts of 80 and 120 requests/s before and after 300 s of 1 to 5
# requests/s. Their duration is not given: with an even rate, (3,107 - 300 * 3) / (80 + 120) = 11 s each.
BURSTS = (80, 120)
BURST_S, QUIET_S = 11, 300
QUIET_RATE = (1, 5)
SERVING_PROMPT, SERVING_RESPONSE = (300, 700), (800, 1200)


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of their arrival.

    arrivals_s: seconds, never falling. prompts, responses: tokens of each request. cap: longest possible response.
    Raises ValueError for requests that cannot be.
    """

    name: str
    arrivals_s: Sequence[float]
    prompts: Sequence[int]
    responses: Sequence[int]
    cap: int

    def __post_init__(self) -> None:
        count = len(self.arrivals_s)
        if not count:
            raise ValueError(f"trace {self.name!r} holds no requests")
        for name in ("prompts", "responses"):
            values = getattr(self, name)
            if len(values) != count:
                raise ValueError(f"trace {self.name!r}: {len(values)} {name} for {count} arrivals_s")
            if min(values) < 1:
                raise ValueError(f"trace {self.name!r}: {name} of {min(values)} tokens; at least 1")
        if max(self.responses) > self.cap:
            raise ValueError(f"trace {self.name!r}: a response of {max(self.responses)} tokens, above cap={self.cap}")
        for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False):
            if later < earlier:
                raise ValueError(f"trace {self.name!r}: arrivals_s fall from {earlier} to {later}")

    @property
    def is_step(self) -> bool:
        """Whether all requests arrive at once, as in a rollout step."""
        return self.arrivals_s[-1] == self.arrivals_s[0]

    def split(self, replicas: int) -> list["Trace"]:
        """One trace for each replica, request i to replica i mod replicas, as verl spreads a batch."""
        if not 1 <= replicas <= len(self.arrivals_s):
            raise ValueError(f"replicas={replicas} for {len(self.arrivals_s)} requests: at least 1, at most one each")
        return [
            Trace(
                self.name,
                self.arrivals_s[r::replicas],
                self.prompts[r::replicas],
                self.responses[r::replicas],
                self.cap,
            )
            for r in range(replicas)
        ]


def rollout_steps(
    steps: int = PAPER_STEPS,
    requests: int = PAPER_REQUESTS,
    median: float = PAPER_MEDIAN,
    p99: float = PAPER_P99,
    cap: int = PAPER_CAP,
    seed: int = 0,
) -> list[Trace]:
    """Synthetic rollout steps: response lengths drawn from the lognormal through median and p99, cut at the cap."""
    if not 1 <= median < p99:
        raise ValueError(f"median={median} and p99={p99}: 1 <= median < p99")
    draw = np.random.default_rng(seed)
    sigma = math.log(p99 / median) / NORMAL_P99

    def lengths(middle: float, spread: float, longest: int) -> list[int]:
        drawn = middle * np.exp(spread * draw.standard_normal(requests))
        return np.clip(drawn.round(), 1, longest).astype(int).tolist()

    return [
        Trace(
            name=f"step {number}",
            arrivals_s=[0.0] * requests,
            prompts=lengths(PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_MAX),
            responses=lengths(median, sigma, cap),
            cap=cap,
        )
        for number in range(1, steps + 1)
    ]


def step_of(name: str, responses: Sequence[int], cap: int | None = None, prompt: int = PROMPT_MEDIAN) -> Trace:
    """A rollout step of these response lengths. cap: the longest of them if left out."""
    cap = max(responses, default=0) if cap is None else cap
    return Trace(name, [0.0] * len(responses), [prompt] * len(responses), list(responses), cap)


def bursty_trace(seed: int = 0, rate_scale: float = 1.0, time_scale: float = 1.0, length_scale: float = 1.0) -> Trace:
    """The bursty serving trace, synthetic: Poisson arrivals, the quiet rate drawn anew each second.

    rate_scale: of the requests per second. time_scale: of the durations. length_scale: of the tokens. With time_scale s
    the quiet rate is drawn anew every s seconds. Raises ValueError for one that is not above 0, or that leaves nothing.
    """
    for name, scale in (("rate_scale", rate_scale), ("time_scale", time_scale), ("length_scale", length_scale)):
        if not 0 < scale < float("inf"):
            raise ValueError(f"{name}={scale}: above 0")
    draw = np.random.default_rng(seed)
    before, after = BURSTS
    rates = [before] * BURST_S + draw.uniform(*QUIET_RATE, QUIET_S).tolist() + [after] * BURST_S
    each = rate_scale * time_scale
    arrivals = time_scale * np.concatenate(
        [second + np.sort(draw.random(draw.poisson(each * rate))) for second, rate in enumerate(rates)]
    )

    def lengths(shortest: int, longest: int) -> list[int]:
        return draw.integers(*_scaled((shortest, longest), length_scale), len(arrivals), endpoint=True).tolist()

    return Trace(
        name="bursty serving",
        arrivals_s=arrivals.tolist(),
        prompts=lengths(*SERVING_PROMPT),
        responses=lengths(*SERVING_RESPONSE),
        cap=_scaled(SERVING_RESPONSE, length_scale)[1],
    )


def burst_windows(time_scale: float = 1.0) -> list[tuple[float, float]]:
    """Begin and end of each burst of bursty_trace, in seconds."""
    later = BURST_S + QUIET_S
    return [(begin * time_scale, (begin + BURST_S) * time_scale) for begin in (0, later)]


def _scaled(bounds: tuple[int, int], scale: float) -> tuple[int, int]:
    shortest, longest = (max(1, round(bound * scale)) for bound in bounds)
    return shortest, longest


def recorded_steps(path: Path) -> list[Trace]:
    """The steps of a dump (rollout/replay), all requests of a step at once. The cap is the longest response of all.

    Raises ValueError naming file and line for what is no dump, and for a file without requests.
    """
    requests = [request for request in read_json_lines(path, RecordedRequest) if request.output_ids]
    if not requests:
        raise ValueError(f"{path} holds no responses")
    cap = max(len(request.output_ids) for request in requests)
    steps: dict[int, list[RecordedRequest]] = defaultdict(list)
    for request in sorted(requests, key=lambda request: (request.step, request.number)):
        steps[request.step].append(request)
    return [
        Trace(
            name=f"step {number}",
            arrivals_s=[0.0] * len(step),
            prompts=[len(request.prompt_ids) for request in step],
            responses=[len(request.output_ids) for request in step],
            cap=cap,
        )
        for number, step in steps.items()
    ]
