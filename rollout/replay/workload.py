"""A dump as a workload: what to send so that the same step runs again."""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebius_engine.telemetry import read_json_lines
from rollout.replay.request import RecordedRequest


@dataclass(frozen=True)
class Workload:
    """One step's requests, in the order of sending."""

    step: int
    prompts: list[list[int]]
    sampling: list[dict[str, Any]]  # SGLang's, for each request; the length is the recorded one whatever is drawn
    lengths: list[int]  # tokens of each response


def read_workloads(path: Path, vocab_size: int, lengths_only: bool = False) -> list[Workload]:
    """The steps of a file that RequestDump wrote (or of several, one after the other), by their number.

    vocab_size: of the model that shall run them. lengths_only: random prompts of the recorded lengths instead of the
    recorded ones. Raises ValueError naming file and line for a line that is not a RecordedRequest, a request that is
    there twice and a token outside the vocabulary; and for a file without requests.
    """
    requests = read_json_lines(path, RecordedRequest)
    if not requests:
        raise ValueError(f"{path} holds no requests")
    lines: dict[tuple[int, int], int] = {}
    steps: dict[int, list[RecordedRequest]] = defaultdict(list)
    for line, request in enumerate(requests, start=1):
        first = lines.setdefault((request.step, request.number), line)
        if first != line:
            raise ValueError(
                f"{path}, line {line}: request {request.number} of step {request.step} stands in line {first} already; "
                "replay one run at a time"
            )
        highest = max(request.prompt_ids)
        if highest >= vocab_size and not lengths_only:
            raise ValueError(
                f"{path}, line {line}: the prompt holds token {highest}, and the model's vocabulary has {vocab_size}; "
                "use the model of the recorded run, or lengths only"
            )
        steps[request.step].append(request)
    return [_workload(step, steps[step], vocab_size if lengths_only else None) for step in sorted(steps)]


def _workload(step: int, requests: Sequence[RecordedRequest], dummy_vocab: int | None) -> Workload:
    requests = sorted(requests, key=lambda request: request.number)
    prompts = [list(request.prompt_ids) for request in requests]
    lengths = [len(request.output_ids) for request in requests]
    sampling = [
        {**request.sampling, "max_new_tokens": length, "ignore_eos": True}
        for request, length in zip(requests, lengths, strict=True)
    ]
    return Workload(step, prompts if dummy_vocab is None else dummy_prompts(prompts, dummy_vocab), sampling, lengths)


def dummy_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> list[list[int]]:
    """Random prompts of the same lengths, the same each time. Equal prompts stay equal: samples of one problem share
    its KV in the prefix cache. What different prompts have in common at their beginning is lost."""
    draw = random.Random(0)
    made: dict[tuple[int, ...], list[int]] = {}
    for prompt in prompts:
        if tuple(prompt) not in made:
            made[tuple(prompt)] = [draw.randrange(vocab_size) for _ in prompt]
    return [made[tuple(prompt)] for prompt in prompts]
