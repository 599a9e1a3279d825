"""DAPO-Math-17k in verl's schema, each problem once."""

from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from recipes.recipe import Source
from recipes.rows import verl_rows

DATA_SOURCE = "math_dapo"  # as in the data set itself
SAMPLE = Path(__file__).with_name("problems.jsonl")


def rows(source: Source | None) -> Dataset:
    """All problems of the data set, or with None the 32 of problems.jsonl, which need no network."""
    if source:
        return convert(load_dataset(source.path, revision=source.revision, split="train"))
    return convert(load_dataset("json", data_files=str(SAMPLE), split="train"))


def convert(raw: Dataset) -> Dataset:
    """One row for each extra_info.index of `raw`, its first, with the prompt as it is: it says how to give the answer.

    Raises ValueError for a prompt that is not one message of the user, with its index.
    """
    first: dict[str, int] = {}
    for position, info in enumerate(raw["extra_info"]):
        first.setdefault(info["index"], position)
    distinct = raw.select(list(first.values()))
    prompts = [_question(index, prompt) for index, prompt in zip(first, distinct["prompt"], strict=True)]
    return verl_rows(DATA_SOURCE, prompts, [rule["ground_truth"] for rule in distinct["reward_model"]])


def _question(index: str, prompt: list[dict[str, Any]]) -> str:
    if [message["role"] for message in prompt] != ["user"]:
        raise ValueError(f"the prompt of {index} must be one user message, got {prompt!r}")
    return prompt[0]["content"]
