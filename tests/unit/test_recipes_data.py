"""Problems in verl's schema, read by verl's own data set and scored by its own reward manager."""

import itertools
import json
from fractions import Fraction
from math import comb, factorial, gcd, isqrt

import pytest
from datasets import Dataset, load_dataset
from typer.testing import CliRunner

from recipes.dapo_math import data as dapo
from recipes.deepmath_grpo import data as deepmath
from recipes.deepmath_sample import loader
from recipes.prepare import prepare
from recipes.recipe import Source, load, names, overrides
from recipes.rows import FEATURES, verl_rows
from recipes.tiny_arithmetic.tokenizer import character_tokenizer
from recipes.tiny_moe import byte_tokenizer
from rollout.cli import app
from rollout.training import compose


def parts(fraction):
    return fraction.numerator + fraction.denominator


def share(items, test):
    items = list(items)
    return Fraction(sum(map(test, items)), len(items))


# The answer to each problem of dapo_math/problems.jsonl, by trying out all cases where there are finitely many.
ANSWERS = [
    sum((n % 6 == 0) != (n % 10 == 0) for n in range(1, 501)),
    next(n for n in range(1, 999) if (n * n + n) % 132 == 0),
    (3**100 + 5**100) % 64,
    sum(720 % a == 0 and gcd(a, 720 // a) == 2 for a in range(1, 721)),
    sum(sum(map(int, str(n))) == 12 for n in range(100, 1000)),
    len(str(factorial(250))) - len(str(factorial(250)).rstrip("0")),
    sum(gcd(n, 1000) == 4 for n in range(1, 1001)),
    sum(n.bit_count() for n in range(64)),
    sum(w[0] == "A" and set(w) == set("ABC") for w in itertools.product("ABC", repeat=5)),
    sum(sum(w) == 8 for w in itertools.product(range(5), repeat=3)),
    sum(abs(w.index(0) - w.index(1)) > 1 for w in itertools.permutations(range(6))),
    sum(sum(s) % 5 == 0 for k in range(10) for s in itertools.combinations(range(1, 10), k)),
    comb(9, 4) - comb(4, 2) * comb(5, 2),
    sum(a + b == c for a, b, c in itertools.combinations(range(1, 11), 3)),
    parts(share(itertools.product(range(6), repeat=3), lambda w: w[0] < w[1] < w[2])),
    parts(share(itertools.combinations(range(1, 10), 2), lambda w: w[0] * w[1] % 2 == 0)),
    next(x * (7 - x) for x in range(8) if x**3 + (7 - x) ** 3 == 133),
    sum(x for x in range(-99, 99) if abs(x - 3) + abs(x + 5) <= 14),
    list(itertools.accumulate(range(5), lambda a, _: a * a - a + 1, initial=2))[4],
    next(k for k in range(1, 99) if sum(2 * n + 1 for n in range(1, k + 1)) == 440),
    next(c for c in range(1, 99) if all(x**4 - 10 * x**2 + c == 0 for x in (-3, -1, 1, 3))),
    sum(x * x + y * y <= 25 for x in range(-5, 6) for y in range(-5, 6)),
    max(n for n in range(-50, 50) if n**3 - 100 * n < 1000),
    sum(comb(4, k) * comb(5, 5 - k) * (-1) ** (5 - k) for k in range(5)),
    isqrt(21 * 8 * 7 * 6),
    sum(a * b for a in range(1, 50) for b in range(a, 50) if a * b == 2 * (a + b)),
    sum(2 * x + 3 * y < 24 for x in range(1, 13) for y in range(1, 9)),
    next(n for n in range(3, 99) if n * (n - 3) // 2 == 54),
    sum(isqrt(n) for n in range(1, 61)),
    sum(sum(n % d == 0 for d in range(1, n + 1)) == 3 for n in range(1, 400)),
    sum((-1) ** k * comb(6, k) * (10 - k) ** 2 for k in range(7)),
    sum(n % 4 == 0 for n in range(1, 101)),
]


def test_answers_of_the_dapo_sample():
    rows = dapo.rows(None)
    assert [int(rule["ground_truth"]) for rule in rows["reward_model"]] == ANSWERS
    assert len({prompt[0]["content"] for prompt in rows["prompt"]}) == 32
    assert all('"Answer: N"' in prompt[0]["content"] for prompt in rows["prompt"])


def test_the_dapo_sample_has_the_schema_of_the_data_set():
    raw = load_dataset("json", data_files=str(dapo.SAMPLE), split="train")
    assert set(raw.column_names) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert set(raw.features["reward_model"]) == {"ground_truth", "style"}
    assert raw.features["extra_info"]["index"].dtype == "string"


def test_dapo_keeps_each_problem_once():
    once = [json.loads(line) for line in dapo.SAMPLE.read_text().splitlines()]
    assert dapo.convert(Dataset.from_list(once * 100)).to_list() == dapo.rows(None).to_list()


def test_dapo_refuses_a_prompt_of_several_messages():
    row = json.loads(dapo.SAMPLE.read_text().splitlines()[3])
    row["prompt"].insert(0, {"role": "system", "content": "Be brief."})
    with pytest.raises(ValueError, match="the prompt of sample-03 must be one user message"):
        dapo.convert(Dataset.from_list([row]))


def test_deepmath_prompt_asks_for_a_box():
    rows = deepmath.rows(None)
    assert len(rows) == 64 and rows.features == FEATURES
    assert rows[0]["prompt"][0]["content"].endswith("put your final answer within \\boxed{}.")
    assert [info["index"] for info in rows["extra_info"]] == list(range(64))


def test_rows_refuse_what_has_no_answer():
    with pytest.raises(ValueError, match="got 2 prompts and 1 answers"):
        verl_rows("source", ["a", "b"], ["1"])
    with pytest.raises(ValueError, match="row 1 of source has an empty prompt or answer: 'b', ' '"):
        verl_rows("source", ["a", "b"], ["1", " "])


@pytest.mark.parametrize(
    ("name", "path", "rows"),
    [("deepmath_grpo", "zwhe99/DeepMath-103K", 103022), ("dapo_math", "BytedTsinghua-SIA/DAPO-Math-17k", 17917)],
)
def test_the_data_set_is_asked_for_at_its_revision(monkeypatch, name, path, rows, tmp_path):
    """The loader gets the sample's rows in place of the Hub's, and so prepare notices that some are missing."""
    asked = {}
    module = {"deepmath_grpo": loader, "dapo_math": dapo}[name]
    raw = load_dataset("json", data_files=str(module.SAMPLE), split="train")

    def from_the_hub(path, revision, split):
        asked.update(path=path, revision=revision, split=split)
        return raw

    monkeypatch.setattr(module, "load_dataset", from_the_hub)
    source = load(name).source
    assert source is not None and len(source.revision) == 40 and int(source.revision, 16)
    with pytest.raises(ValueError, match=f"{path} at {source.revision} has {len(raw)} rows, and .* says {rows}"):
        prepare(name, tmp_path / "data")
    assert asked == {"path": path, "revision": source.revision, "split": "train"}
    assert not (tmp_path / "data").exists()


def test_a_data_set_that_cannot_be_loaded_is_one_line(monkeypatch, tmp_path):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach it\non the Hub")

    monkeypatch.setattr(loader, "load_dataset", unreachable)
    result = CliRunner().invoke(app, ["recipe", "deepmath_grpo", "--prepare", "--data", str(tmp_path)])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: zwhe99/DeepMath-103K at 5cf055d") and "Couldn't reach it on the Hub" in line
    assert "--sample" in line


@pytest.mark.parametrize(("name", "counts"), [("dapo_math", (31, 1)), ("deepmath_grpo", (63, 1))])
def test_a_sample_is_prepared_and_verl_reads_it(tmp_path, name, counts):
    read_by_verl(tmp_path, name, counts, byte_tokenizer(4096))


def test_tiny_arithmetic_is_prepared_and_verl_reads_it(tmp_path):
    read_by_verl(tmp_path, "tiny_arithmetic", (972, 52), character_tokenizer(512))


def read_by_verl(folder, name, counts, tokenizer):
    from verl.trainer.ppo.utils import create_rl_dataset

    assert tuple(prepare(name, folder, sample=True).values()) == counts
    config = compose("gpu", [*overrides(name, folder), "data.filter_overlong_prompts=false"])
    for file, count in zip((config.data.train_files, config.data.val_files), counts, strict=True):
        rows = create_rl_dataset(file, config.data, tokenizer, processor=None)
        assert len(rows) == count
        row = rows[0]
        assert [message["role"] for message in row["raw_prompt"]] == ["user"]
        assert row["reward_model"]["ground_truth"] and row["data_source"] and row["index"] >= 0


def test_a_generated_recipe_has_no_source():
    assert [name for name in names() if load(name).source is None] == ["tiny_arithmetic"]
    from recipes.tiny_arithmetic import data

    with pytest.raises(ValueError, match="the problems of tiny_arithmetic are generated, got source elsewhere"):
        data.rows(Source(path="elsewhere", revision="0" * 40, rows=1))


@pytest.mark.parametrize(
    ("answer", "tokens", "reward", "acc"),
    [
        ("Answer: 12", 12000, 1.0, 1.0),
        ("Answer: 13", 12000, -1.0, 0.0),
        ("Answer: 12", 18432, 0.5, 1.0),  # half of the last 4,096 tokens are used: half of the penalty
        ("Answer: 12", 20480, 0.0, 1.0),
    ],
)
def test_verl_scores_a_dapo_response_with_overlong_shaping(tmp_path, answer, tokens, reward, acc):
    import asyncio

    import numpy as np
    import torch
    from verl import DataProto
    from verl.trainer.ppo.reward import load_reward_manager

    config = compose("gpu", overrides("dapo_math", tmp_path))
    tokenizer = byte_tokenizer(32768)
    ids = tokenizer(answer.rjust(tokens), return_tensors="pt").input_ids
    assert ids.shape == (1, tokens)
    batch = DataProto.from_dict(
        {"responses": ids, "attention_mask": torch.ones_like(ids)},
        non_tensors={
            "data_source": np.array([dapo.DATA_SOURCE], dtype=object),
            "reward_model": np.array([{"style": "rule", "ground_truth": "12"}], dtype=object),
            "extra_info": np.array([{"index": 0}], dtype=object),
        },
    )

    async def score():
        return await load_reward_manager(config, tokenizer).run_single(batch)

    result = asyncio.run(score())
    assert float(result["reward_score"]) == pytest.approx(reward)
    assert result["reward_extra_info"][config.algorithm.filter_groups.metric] == acc
