"""Loads problems in the schema of DeepMath-103K (arXiv 2504.11456): from a JSON-lines file, or a data set's name."""

from pathlib import Path

from datasets import Dataset, Features, Value, load_dataset

SAMPLE = Path(__file__).with_name("problems.jsonl")

FEATURES = Features(
    {
        "question": Value("string"),
        "final_answer": Value("string"),
        "difficulty": Value("float64"),
        "topic": Value("string"),  # from general to special: "Mathematics -> Algebra -> ..."
        "r1_solution_1": Value("string"),
        "r1_solution_2": Value("string"),
        "r1_solution_3": Value("string"),
    }
)


def load_problems(source: str | Path = SAMPLE, revision: str | None = None) -> Dataset:
    """The problems of `source`, one row each, with exactly the columns of `FEATURES`; others are left out.

    source: a JSON-lines file (.jsonl), or the name or folder of a Hugging Face data set with a "train" split.
    revision: the commit of a data set on the Hub.
    Raises ValueError naming the missing columns, FileNotFoundError for a file that is not there.
    """
    if str(source).endswith(".jsonl"):
        problems = load_dataset("json", data_files=str(source), split="train")
    else:
        problems = load_dataset(str(source), revision=revision, split="train")
    missing = [name for name in FEATURES if name not in problems.column_names]
    if missing:
        raise ValueError(
            f"{source} has no column {', '.join(missing)}; it has {', '.join(problems.column_names)}. "
            "The schema is that of DeepMath-103K"
        )
    return problems.select_columns(list(FEATURES)).cast(FEATURES)
