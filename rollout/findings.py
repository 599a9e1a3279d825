"""What `moebius-rollout verify` has compared, and what differs. No engine: digests, answers and records come in."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moebius_engine.telemetry import SwitchRecord
from rollout.checksum import Digests

Answer = Mapping[str, Any]

# The same weights in another layout round differently: below 1e-4 in fp32 on this model. A layer with a wrong expert or
# a lost KV row moves them by more than 1e-2 (tests/engine/test_switch.py holds both). The bound lies between.
MAX_LOGPROB_DIFF = 1e-3

# Where the router's scores of the last expert chosen and of the next one are equal but for the last bits, rounding
# decides which of them runs. Seen on an H200 with scores 9e-6 apart: the expected token's logprob moved by 9e-3, and
# one 3e-3 behind it was drawn. A wrong switch moves them by more (see above).
MAX_TIE_DIFF = 1e-2
# Share of the requests that may be undecided so.
MAX_UNDECIDED = 1 / 8


@dataclass
class Findings:
    """What was compared, and what differs. Every method adds to it; nothing raises for a difference."""

    faults: list[str] = field(default_factory=list)
    inflight: list[int] = field(default_factory=list)  # at each committed switch [requests]
    requests: int = 0
    tokens: int = 0
    bytes: int = 0
    max_logprob_diff: float = 0.0
    checksums: dict[str, str] = field(default_factory=dict)  # of all parameters, by the layout found last
    undecided: dict[int, str] = field(default_factory=dict)  # requests that rounding decides, and how they differ
    of: int = 0  # requests, each answered several times

    def add_switch(self, number: int, record: SwitchRecord | None) -> None:
        """A switch and the KV compared within it."""
        if record is None:
            self.faults.append(f"switch {number}: the engine was in that layout already")
        elif record.refused:
            self.faults.append(f"switch {number} to {record.target} was refused: {record.refused}")
        else:
            self.inflight.append(record.inflight)
            self.bytes += record.kv_bytes
            if record.inflight < 1:
                self.faults.append(f"switch {number} to {record.target}: nothing was in flight, so it proves nothing")

    def add_weights(self, where: str, fresh: Digests, found: Digests) -> None:
        """All ranks' parameters after a switch, against a fresh start in that layout."""
        if len(fresh) != len(found):
            self.faults.append(f"{where}: weights of {len(found)} ranks, a fresh start has {len(fresh)}")
        for rank, (expected, actual) in enumerate(zip(fresh, found, strict=False)):
            for name in sorted(expected.keys() | actual.keys()):
                if name not in expected or name not in actual:
                    owner = "the fresh start" if name in expected else "the switched engine"
                    self.faults.append(f"{where}, rank {rank}: only {owner} has {name}")
                    continue
                self.bytes += expected[name][1]
                if actual[name] != expected[name]:
                    self.faults.append(f"{where}, rank {rank}: {name} differs from a fresh start")

    def choose(self, unswitched: Mapping[str, Sequence[Answer]]) -> list[int]:
        """Indices of the requests on which the two unswitched runs agree (name of the run → answers). The others cannot
        tell a wrong switch from a right one."""
        (name, expected), (other, actual) = unswitched.items()
        self.of = len(expected)
        for request, (one, two) in enumerate(zip(actual, expected, strict=True)):
            if reason := difference(one, two)[0]:
                self._leave(request, f"in {other} differs from {name}: {reason}")
        return [request for request in range(self.of) if request not in self.undecided]

    def add_answer(self, request: int, answer: Answer, unswitched: Mapping[str, Answer]) -> None:
        """The answer to a request, against each unswitched run's (name of the run → answer)."""
        self.requests += 1
        compared = len(answer["output_ids"])
        for run, expected in unswitched.items():
            reason, diff = difference(answer, expected)
            if reason and is_tie(answer, expected):
                self._leave(request, f"differs from {run}: {reason}")
                compared = 0
                continue
            if reason:
                self.faults.append(f"request {request} differs from {run}: {reason}")
            if math.isfinite(diff):
                self.max_logprob_diff = max(self.max_logprob_diff, diff)
        self.tokens += compared

    def _leave(self, request: int, reason: str) -> None:
        if request in self.undecided:
            return
        self.undecided[request] = reason
        most = int(MAX_UNDECIDED * self.of)
        if len(self.undecided) == most + 1:
            number, first = next(iter(self.undecided.items()))
            self.faults.append(f"more than {most} of {self.of} requests are undecided. First request {number} {first}")

    def result(self) -> dict[str, Any]:
        """The line of JSON. switches: committed. bytes_compared: KV and weights, of all ranks. undecided: requests;
        tokens_compared and max_logprob_diff are without them. weights_checksum: of all ranks' parameters in each layout
        (rollout/checksum.py)."""
        return {
            "switches": len(self.inflight),
            "inflight_min": min(self.inflight, default=0),
            "requests": self.requests,
            "tokens_compared": self.tokens,
            "bytes_compared": self.bytes,
            "undecided": len(self.undecided),
            "max_logprob_diff": self.max_logprob_diff,
            "weights_checksum": self.checksums,
            "ok": not self.faults and self.tokens > 0,
        }


def difference(answer: Answer, expected: Answer) -> tuple[str | None, float]:
    """What differs between two answers to a request, or None; and the largest difference of their logprobs.

    After the first token that differs the logprobs cannot be compared: nan.
    """
    tokens, others = answer["output_ids"], expected["output_ids"]
    if len(tokens) != len(others):
        return f"{len(tokens)} tokens, {len(others)} expected", math.nan
    place, diffs = _common(answer, expected)
    diff = math.nan if any(map(math.isnan, diffs)) else max(diffs, default=0.0)
    if place < len(tokens):
        drawn, wanted = logprobs(answer)[place], logprobs(expected)[place]
        return (
            f"token {place} is {tokens[place]}, {others[place]} expected (logprobs {drawn:.6f} and {wanted:.6f}; those "
            f"before lie up to {diff:.2e} apart)"
        ), math.nan
    if not diff <= MAX_LOGPROB_DIFF:  # also for nan
        return f"logprobs by up to {diff:.2e} > {MAX_LOGPROB_DIFF}", diff
    return None, diff


def is_tie(answer: Answer, expected: Answer) -> bool:
    """Whether two answers of one length differ by no more than rounding does where two experts tie.

    Up to the first token that differs the logprobs lie within MAX_TIE_DIFF, and that token was as close behind the
    expected one. expected: with the logprobs of the two likeliest tokens.
    """
    tokens = answer["output_ids"]
    if len(tokens) != len(expected["output_ids"]):
        return False
    place, diffs = _common(answer, expected)
    if not all(diff <= MAX_TIE_DIFF for diff in diffs):  # also for nan
        return False
    if place == len(tokens):
        return True
    likely = expected["meta_info"]["output_top_logprobs"][place]
    best = likely[0][0]
    return any(token == tokens[place] and best - logprob <= MAX_TIE_DIFF for logprob, token, _ in likely)


def _common(answer: Answer, expected: Answer) -> tuple[int, list[float]]:
    """How many tokens two answers of one length have in common before the first that differs, and by how much the
    logprobs of these differ."""
    pairs = zip(answer["output_ids"], expected["output_ids"], strict=True)
    place = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    diffs = [abs(one - other) for one, other in zip(logprobs(answer), logprobs(expected), strict=True)]
    return place, diffs[:place]


def logprobs(answer: Answer) -> list[float]:
    """Logprobs of an answer's output tokens; nan for one that SGLang did not give."""
    return [math.nan if entry[0] is None else entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
