"""What `moebius-rollout verify` compares in bfloat16: logprobs of the same tokens, drawn and read again as a prompt."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.findings import Answer, Findings, logprobs

# How much further apart than in the unswitched runs the logprobs may lie: all answers' mean, and the worst answer's. A
# lost KV row or a wrong expert moves them by many times the spread; the worst of many answers varies, the mean hardly.
MAX_MEAN_RATIO, MAX_WORST_RATIO = 1.25, 2.0


@dataclass
class ForcedFindings(Findings):
    """Findings of a run in which rounding decides the tokens.

    spread, diffs: of each answer, unswitched and switched, the mean over its tokens of |logprob when drawn - logprob
    when read| [nats]. The unswitched ones in a list for each pair of layouts, of drawing and of reading: a switched
    answer is drawn in both, and the layouts add up in different orders.
    """

    spread: list[list[float]] = field(default_factory=list)
    diffs: list[float] = field(default_factory=list)

    def add_unswitched(self, answers: Sequence[Answer], read: Sequence[Answer]) -> None:
        """Answers of a run without a switch, and the same tokens read again in the same layout, or in the other."""
        found = []
        for number, (answer, again) in enumerate(zip(answers, read, strict=True)):
            if diffs := self._diffs(f"unswitched request {number}", answer, again):
                found.append(statistics.fmean(diffs))
        self.spread.append(found)

    def add_switched(self, numbers: Sequence[int], answers: Sequence[Answer], read: Sequence[Answer]) -> None:
        """Answers to requests `numbers`, drawn while the engine switched, and the same tokens read again by it."""
        for number, answer, again in zip(numbers, answers, read, strict=True):
            if diffs := self._diffs(f"request {number}", answer, again):
                self.requests += 1
                self.tokens += len(diffs)
                self.diffs.append(statistics.fmean(diffs))
                self.max_logprob_diff = max(self.max_logprob_diff, *diffs)
        if not self.diffs or not self._unswitched_mean:
            self.faults.append("no answer was compared")
            return
        mean, unswitched = statistics.fmean(self.diffs), self._unswitched_mean
        if mean > MAX_MEAN_RATIO * unswitched:
            self.faults.append(
                f"logprobs lie {mean:.2e} apart on average, more than {MAX_MEAN_RATIO} times the {unswitched:.2e} of "
                "runs without a switch"
            )
        worst = max(range(len(self.diffs)), key=self.diffs.__getitem__)
        furthest = max(map(max, filter(None, self.spread)))
        if self.diffs[worst] > MAX_WORST_RATIO * furthest:
            self.faults.append(
                f"logprobs of request {numbers[worst]} lie {self.diffs[worst]:.2e} apart, more than {MAX_WORST_RATIO} "
                f"times the {furthest:.2e} of the worst without a switch"
            )

    def result(self) -> dict[str, Any]:
        """Findings.result, and the two means [nats]."""
        return super().result() | {
            "forced_logprob_diff": statistics.fmean(self.diffs) if self.diffs else None,
            "forced_logprob_spread": self._unswitched_mean,
        }

    @property
    def _unswitched_mean(self) -> float | None:
        """Of the pair of layouts that lies furthest apart."""
        return max((statistics.fmean(pair) for pair in self.spread if pair), default=None)

    def _diffs(self, what: str, answer: Answer, again: Answer) -> list[float]:
        """One for each token of the answer; none and a fault if a logprob is missing."""
        drawn = logprobs(answer)
        read = [entry[0] for entry in again["meta_info"]["input_token_logprobs"]][-len(drawn) :]
        if len(read) != len(drawn) or None in read or any(one != one for one in drawn):
            self.faults.append(f"{what}: {len(drawn)} logprobs drawn, {len(read)} read, or one of them is missing")
            return []
        return [abs(one - other) for one, other in zip(drawn, read, strict=True)]
