"""DeepMath-103K in verl's schema."""

from datasets import Dataset

from recipes.deepmath_sample import load_problems
from recipes.recipe import Source
from recipes.rows import verl_rows

DATA_SOURCE = "zwhe99/DeepMath-103K"
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def rows(source: Source | None) -> Dataset:
    """All problems of the data set, or with None those of recipes/deepmath_sample, which need no network."""
    problems = load_problems(source.path, source.revision) if source else load_problems()
    prompts = [f"{question}\n\n{INSTRUCTION}" for question in problems["question"]]
    return verl_rows(DATA_SOURCE, prompts, problems["final_answer"])
