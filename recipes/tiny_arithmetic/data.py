"""The problems a+b= with 0 ≤ a, b < 100, their working, and the reward."""

import random
from typing import Any

from datasets import Dataset

from recipes.recipe import Source
from recipes.rows import verl_rows

DATA_SOURCE = "moebius/tiny_arithmetic"
LIMIT = 100
COUNT = 1024
ANSWER = "#"


def question(a: int, b: int) -> str:
    return f"{a}+{b}="


def working(a: int, b: int) -> str:
    """Column addition, ones first: 47+38 gives '7+8=15 4+3+1=8', 3+4 gives '3+4=7'."""
    ones = a % 10 + b % 10
    steps = [f"{a % 10}+{b % 10}={ones}"]
    if max(a, b) >= 10:
        carry = "+1" if ones >= 10 else ""
        steps.append(f"{a // 10}+{b // 10}{carry}={a // 10 + b // 10 + (ones >= 10)}")
    return " ".join(steps)


def problems(count: int, seed: int) -> list[tuple[int, int]]:
    """`count` different problems in random order. Raises ValueError if there are not that many."""
    if not 1 <= count <= LIMIT * LIMIT:
        raise ValueError(f"count must be between 1 and the {LIMIT * LIMIT} problems that exist, got {count}")
    return [divmod(index, LIMIT) for index in random.Random(seed).sample(range(LIMIT * LIMIT), count)]


def rows(source: Source | None) -> Dataset:
    """COUNT problems in verl's schema. Raises ValueError if given a source: there is none."""
    if source:
        raise ValueError(f"the problems of tiny_arithmetic are generated, got source {source.path}")
    pairs = problems(COUNT, seed=0)
    return verl_rows(DATA_SOURCE, [question(a, b) for a, b in pairs], [str(a + b) for a, b in pairs])


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """1 if what follows the last '#' is the sum, else 0; verl's reward.custom_reward_function."""
    right = float(ANSWER in solution_str and solution_str.rpartition(ANSWER)[2].strip() == ground_truth)
    return {"score": right, "acc": right}
