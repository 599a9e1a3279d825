"""What `moebius-rollout verify` has compared, and what differs. No engine: digests, answers and records come in."""

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

# Two tokens whose logprobs lie closer than this are a tie: rounding decides which of them is drawn.
TIE = 1e-4
# Share of the requests that may be left out because rounding decides their tokens in unswitched runs.
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

    def choose(self, unswitched: Mapping[str, Sequence[Answer]]) -> tuple[list[int], dict[int, str]]:
        """Indices of the requests that can tell a wrong switch from a right one, and why the others cannot.

        unswitched: name of a run without a switch → its answers, with the logprobs of the two likeliest tokens. Where
        two tokens, or the router scores of two experts, are equal but for the last bits, rounding decides, and it
        differs between layouts, and between a prompt that is computed and one that is cached.
        """
        (name, expected), *others = unswitched.items()
        undecided: dict[int, str] = {}
        for request, one in enumerate(expected):
            for other, answers in others:
                if reason := difference(answers[request], one)[0]:
                    undecided.setdefault(request, f"{name} and {other} differ: {reason}")
            for run, answers in unswitched.items():
                if reason := tie(answers[request]):
                    undecided.setdefault(request, f"{run}: {reason}")
        if len(undecided) > MAX_UNDECIDED * len(expected):
            request, reason = next(iter(undecided.items()))
            self.faults.append(
                f"without any switch, {len(undecided)} of {len(expected)} requests are undecided; at most "
                f"{int(MAX_UNDECIDED * len(expected))} may be. First request {request}: {reason}"
            )
        return [request for request in range(len(expected)) if request not in undecided], undecided

    def add_answer(self, request: int, answer: Answer, unswitched: Mapping[str, Answer]) -> None:
        """The answer to a request, against each unswitched run's (name of the run → answer)."""
        self.requests += 1
        self.tokens += len(answer["output_ids"])
        for run, expected in unswitched.items():
            reason, diff = difference(answer, expected)
            if reason:
                self.faults.append(f"request {request} differs from {run}: {reason}")
            if math.isfinite(diff):
                self.max_logprob_diff = max(self.max_logprob_diff, diff)

    def result(self) -> dict[str, Any]:
        """The line of JSON. switches: committed. bytes_compared: KV and weights, of all ranks. weights_checksum: of all
        ranks' parameters in each layout (rollout/checksum.py)."""
        return {
            "switches": len(self.inflight),
            "inflight_min": min(self.inflight, default=0),
            "requests": self.requests,
            "tokens_compared": self.tokens,
            "bytes_compared": self.bytes,
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
    pairs = list(zip(logprobs(answer), logprobs(expected), strict=True))
    diffs = [abs(one - other) for one, other in pairs]
    for place, (token, other) in enumerate(zip(tokens, others, strict=True)):
        if token != other:
            drawn, wanted = pairs[place]
            return (
                f"token {place} is {token}, {other} expected (logprobs {drawn:.6f} and {wanted:.6f}; those before lie "
                f"up to {max(diffs[:place], default=0.0):.2e} apart)"
            ), math.nan
    diff = math.nan if any(map(math.isnan, diffs)) else max(diffs, default=0.0)
    if not diff <= MAX_LOGPROB_DIFF:  # also for nan
        return f"logprobs by up to {diff:.2e} > {MAX_LOGPROB_DIFF}", diff
    return None, diff


def tie(answer: Answer) -> str | None:
    """The first token that rounding may have decided, or None."""
    for place, likeliest in enumerate(answer["meta_info"]["output_top_logprobs"]):
        (first, token, _), (second, other, _) = likeliest
        if first - second < TIE:
            return f"token {place} is {token} or {other}, whose logprobs lie {first - second:.1e} apart"
    return None


def logprobs(answer: Answer) -> list[float]:
    """Logprobs of an answer's output tokens; nan for one that SGLang did not give."""
    return [math.nan if entry[0] is None else entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
