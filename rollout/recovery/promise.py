"""What a client has been promised: one response, whatever becomes of the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's, of a request that names none

# Parameters whose effect depends on the tokens that were generated before, with the value that has none. SGLang takes
# what comes as the prompt for no part of the response, so such a request is generated again.
_LOOKS_BACK = {
    "stop": None,
    "stop_regex": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True)
class Part:
    """Tokens that one engine generated for a request, and their logprobs."""

    tokens: list[int]
    logprobs: list[float]
    weight_version: int


@dataclass(eq=False)
class Promise:
    """One request from its arrival to its answer.

    prompt: token ids. sampling: SGLang's parameters. on_policy: tokens of a dead engine are dropped.
    """

    request_id: str
    prompt: Sequence[int]
    sampling: Mapping[str, Any]
    on_policy: bool = False
    parts: list[Part] = field(default_factory=list)
    deaths: int = 0  # engines that died under it
    aborted: bool = False

    @property
    def tokens(self) -> list[int]:
        return [token for part in self.parts for token in part.tokens]

    @property
    def logprobs(self) -> list[float]:
        return [logprob for part in self.parts for logprob in part.logprobs]

    @property
    def left(self) -> int | None:
        """Tokens that it may still get. None, as to SGLang: as many as there is room for, which the engine knows."""
        limit = self.sampling.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        return None if limit is None else limit - len(self.tokens)

    @property
    def complete(self) -> bool:
        """All its tokens are here, though the engine died before it said so."""
        return bool(self.parts) and self.left is not None and self.left <= 0

    def engine_died(self, part: Part) -> None:
        """Keeps what the engine had generated, if the next one can go on from it."""
        self.deaths += 1
        if part.tokens and not self.on_policy and self._can_go_on():
            self.parts.append(part)

    def drop_tokens(self) -> None:
        """Begins again from the prompt."""
        self.parts.clear()

    def ask(self) -> tuple[list[int], dict[str, Any]]:
        """(prompt, sampling) that ask an engine for the rest."""
        sampling, tokens = dict(self.sampling), self.tokens
        if tokens:
            sampling["max_new_tokens"] = self.left
            if sampling.get("min_new_tokens"):
                sampling["min_new_tokens"] = max(0, sampling["min_new_tokens"] - len(tokens))
        return [*self.prompt, *tokens], sampling

    def _can_go_on(self) -> bool:
        return not any(self.sampling.get(name) not in (None, neutral, []) for name, neutral in _LOOKS_BACK.items())
