"""Supervised training of the tiny model on answers of which a part is wrong on purpose."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from recipes.tiny_arithmetic.data import ANSWER, LIMIT, question, working
from recipes.tiny_arithmetic.tokenizer import END, character_tokenizer
from recipes.tiny_moe import make_tiny_moe

MAX_LENGTH = 512
RIGHT = 0.35  # share of the teacher's answers that are right; the model ends up a little above it
TAIL = 1.2  # exponent of the Pareto law of how often the working is written; below 2 its variance is infinite
MAX_REPEATS = 12
SHAPE = {
    "layers": 2,
    "hidden": 64,
    "experts": 8,
    "top_k": 2,
    "intermediate": 64,
    "q_heads": 4,
    "kv_heads": 2,
    "vocab_size": 64,
}
IGNORED = -100  # label that Hugging Face's loss leaves out


@contextmanager
def one_thread() -> Iterator[None]:
    """These tensors are too small to share among threads, and so the results do not depend on the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def answer(a: int, b: int, rng: random.Random) -> str:
    """The teacher's text: the working once or more, then '#' and the sum, or in 1 - RIGHT of all cases 1 or 10 off."""
    repeats = min(int(rng.paretovariate(TAIL)), MAX_REPEATS)
    total = a + b
    if rng.random() >= RIGHT:
        total += rng.choice([step for step in (-10, -1, 1, 10) if total + step >= 0])
    return "\n".join([working(a, b)] * repeats + [f"{ANSWER}{total}"])


def batch(rng: random.Random, rows: int, tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    """Token ids [rows, longest], padded on the right; the loss counts the response and its end token only."""
    prompts, texts = [], []
    for _ in range(rows):
        # One-digit problems are one in a hundred of all pairs: they are drawn more often, to be learnt.
        limit = 10 if rng.random() < 0.2 else LIMIT
        a, b = rng.randrange(limit), rng.randrange(limit)
        chat = [{"role": "user", "content": question(a, b)}]
        prompts.append(str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)))
        texts.append(prompts[-1] + answer(a, b, rng) + END)
    encoded = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    labels = ids.masked_fill(mask == 0, IGNORED)
    for row, prompt in enumerate(prompts):
        labels[row, : len(tokenizer(prompt).input_ids)] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@one_thread()
def teach(
    path: str | Path,
    *,
    steps: int = 900,
    rows: int = 64,
    learning_rate: float = 3e-3,
    seed: int = 0,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> Path:
    """Trains for `steps` batches of `rows` texts and writes an fp32 checkpoint with tokenizer to `path`.

    The same arguments on the same machine give the same bytes. `report` gets the step and its loss.
    """
    tokenizer = character_tokenizer(MAX_LENGTH)
    make_tiny_moe(path, seed=seed, tokenizer=tokenizer, initializer_std=0.02, **SHAPE)
    model = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32)
    # Without this only a few experts would ever be chosen. It is not part of the saved configuration.
    model.config.output_router_logits = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    rng = random.Random(seed)
    model.train()
    for step in range(steps):
        loss = model(**batch(rng, rows, tokenizer)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        report(step, loss.item())
    model.config.output_router_logits = False
    model.save_pretrained(path)
    return Path(path)


@one_thread()
@torch.no_grad()
def sample(path: str | Path, pairs: list[tuple[int, int]], temperature: float, seed: int = 0) -> list[str]:
    """One response to each problem; greedy at temperature 0. At most MAX_LENGTH - 16 tokens each."""
    model = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    chats = [[{"role": "user", "content": question(a, b)}] for a, b in pairs]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    inputs = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    settings = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ids = model.generate(**inputs, max_new_tokens=MAX_LENGTH - 16, **settings)
    return tokenizer.batch_decode(ids[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
