"""The tiny model that adds: its texts, its tokenizer, how it is taught, and the checkpoint that is kept."""

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from recipes.recipe import FOLDER
from recipes.tiny_arithmetic.data import LIMIT, compute_score, problems, question, rows, working
from recipes.tiny_arithmetic.teach import IGNORED, MAX_LENGTH, MAX_REPEATS, RIGHT, answer, batch
from recipes.tiny_arithmetic.tokenizer import CHARACTERS, character_tokenizer

CHECKPOINT = FOLDER / "tiny_arithmetic" / "checkpoint"
numbers = st.integers(0, LIMIT - 1)


@given(numbers, numbers)
def test_working_is_right_and_gives_the_sum(a, b):
    steps = [step.split("=") for step in working(a, b).split()]
    assert all(sum(map(int, left.split("+"))) == int(right) for left, right in steps)
    ones, *tens = [int(right) for _, right in steps]
    assert (ones % 10 + 10 * tens[0] if tens else ones) == a + b


@pytest.mark.parametrize(
    ("a", "b", "text"), [(3, 4, "3+4=7"), (7, 8, "7+8=15"), (12, 7, "2+7=9 1+0=1"), (47, 38, "7+8=15 4+3+1=8")]
)
def test_working(a, b, text):
    assert working(a, b) == text


@given(numbers, numbers, st.integers(0, 1 << 32))
def test_an_answer_fits_and_is_at_most_ten_off(a, b, seed):
    text = answer(a, b, random.Random(seed))
    assert set(text) <= set(CHARACTERS)
    assert len(text) < MAX_LENGTH - 16
    *lines, last = text.split("\n")
    assert lines == [working(a, b)] * len(lines) and 1 <= len(lines) <= MAX_REPEATS
    assert int(last.removeprefix("#")) - (a + b) in (-10, -1, 0, 1, 10)


def test_answers_are_right_as_often_as_said_and_their_lengths_have_a_tail():
    rng = random.Random(0)
    texts = [answer(47, 38, rng) for _ in range(4000)]
    right = [compute_score("", text, "85")["acc"] for text in texts]
    assert statistics.mean(right) == pytest.approx(RIGHT, abs=0.03)
    lengths = sorted(map(len, texts))
    assert lengths[3960] > 5 * lengths[2000]


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("7+8=15 4+3+1=8\n#85", 1),
        ("#85", 1),
        ("#85 ", 1),
        ("#84\n#85", 1),
        ("#85\n#84", 0),
        ("85", 0),
        ("#", 0),
        ("", 0),
    ],
)
def test_reward(response, score):
    assert compute_score("moebius/tiny_arithmetic", response, "85") == {"score": score, "acc": score}


def test_problems_are_different_and_the_same_each_time():
    assert len(set(problems(500, seed=3))) == 500
    assert problems(500, seed=3) == problems(500, seed=3) != problems(500, seed=4)
    assert rows(None)[0]["prompt"][0]["content"] == question(*problems(1024, seed=0)[0])
    with pytest.raises(ValueError, match="count must be between 1 and the 10000 problems that exist, got 10001"):
        problems(10001, seed=0)


def test_tokenizer_is_one_token_a_character(tmp_path):
    character_tokenizer(64).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "12+7=\n#19 "
    assert tokenizer.decode(tokenizer(text).input_ids) == text and len(tokenizer(text).input_ids) == len(text)
    assert tokenizer("x1").input_ids == tokenizer("?1").input_ids
    chat = [{"role": "user", "content": "3+4="}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|user|>3+4=<|assistant|>"
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "3+4="


def test_the_loss_counts_the_response_and_its_end():
    tokenizer = character_tokenizer(MAX_LENGTH)
    data = batch(random.Random(0), 8, tokenizer)
    for ids, labels in zip(data["input_ids"], data["labels"], strict=True):
        counted = labels[labels != IGNORED].tolist()
        assert counted.count(tokenizer.eos_token_id) == 1 and counted[-1] == tokenizer.eos_token_id
        before, response = tokenizer.decode(ids).split("<|assistant|>")
        assert before.startswith("<|user|>")
        assert tokenizer.decode(counted) == response[: response.index("<|im_end|>") + len("<|im_end|>")]


def in_a_process(script: str, *arguments: object):
    """The script's last line of output, as JSON. In a process of its own, as it is used: in one that has run this
    project's engine tests transformers was seen to compute something else."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout.splitlines()[-1])


TEACH = """
import json, sys
from recipes.tiny_arithmetic.teach import teach
losses = []
teach(sys.argv[1], steps=3, rows=8, seed=5, report=lambda step, loss: losses.append(loss))
print(json.dumps(losses))
"""


@pytest.mark.slow
def test_teaching_is_the_same_for_the_same_seed(tmp_path):
    losses = [in_a_process(TEACH, tmp_path / folder) for folder in ("a", "b")]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    read = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("a", "b")]
    assert read[0] == read[1]


def test_the_checkpoint_is_small_fp32_and_divides_among_2_and_4_ranks():
    assert sum(file.stat().st_size for file in Path(CHECKPOINT).iterdir()) < 1 << 20
    config = AutoConfig.from_pretrained(CHECKPOINT)
    assert (config.model_type, config.dtype, config.output_router_logits) == ("qwen3_moe", torch.float32, False)
    sizes = (config.num_experts, config.num_attention_heads, config.num_key_value_heads, config.moe_intermediate_size)
    assert sizes == (8, 4, 2, 64)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert AutoTokenizer.from_pretrained(CHECKPOINT).get_vocab() == character_tokenizer(MAX_LENGTH).get_vocab()


SAMPLE = """
import json, sys
from recipes.tiny_arithmetic.teach import sample
print(json.dumps(sample(sys.argv[1], json.loads(sys.argv[2]), temperature=1.0)))
"""


def test_the_checkpoint_adds_and_is_not_yet_good_at_it():
    pairs = problems(128, seed=1)
    texts = in_a_process(SAMPLE, CHECKPOINT, json.dumps(pairs))
    scores = [compute_score("", text, str(a + b))["score"] for text, (a, b) in zip(texts, pairs, strict=True)]
    assert 0.3 < statistics.mean(scores) < 0.6
    lengths = sorted(map(len, texts))
    assert lengths[-3] > 4 * lengths[64]


def test_the_length_of_the_plain_loop_is_what_the_pages_say():
    root = Path(__file__).parents[2]
    lines = len(root.joinpath("recipes/tiny_arithmetic/plain_grpo.py").read_text(encoding="utf-8").splitlines())
    for page in ("README.md", "docs/other_loops.md"):
        assert f"GRPO in {lines} lines" in root.joinpath(page).read_text(encoding="utf-8"), (page, lines)
