"""verl's schema of training data: one row a problem (verl/utils/dataset/rl_dataset.py)."""

from collections.abc import Sequence

from datasets import Dataset, Features, List, Value

FEATURES = Features(
    {
        "data_source": Value("string"),
        "prompt": List({"role": Value("string"), "content": Value("string")}),
        "ability": Value("string"),
        "reward_model": {"style": Value("string"), "ground_truth": Value("string")},
        "extra_info": {"index": Value("int64")},
    }
)


def verl_rows(data_source: str, prompts: Sequence[str], answers: Sequence[str]) -> Dataset:
    """A row for each prompt and its answer; extra_info.index counts from 0.

    Raises ValueError for lengths that differ, and for an empty prompt or answer, with its index.
    """
    if len(prompts) != len(answers):
        raise ValueError(f"each prompt needs an answer, got {len(prompts)} prompts and {len(answers)} answers")
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if not prompt.strip() or not answer.strip():
            raise ValueError(f"row {index} of {data_source} has an empty prompt or answer: {prompt!r}, {answer!r}")
    rows = [
        {
            "data_source": data_source,
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index},
        }
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    return Dataset.from_list(rows, features=FEATURES)
