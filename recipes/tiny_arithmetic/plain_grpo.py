"""GRPO without a training framework: Ray, torch, transformers and the rollout actor, on the tiny model and a CPU.

`python -m recipes.tiny_arithmetic.plain_grpo --steps 16`. docs/other_loops.md says why the calls come in this order.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import ray
import torch
import typer
from transformers import AutoTokenizer, Qwen3MoeForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from moebius_engine.telemetry import StepReport
from recipes.tiny_arithmetic.data import COUNT, DATA_SOURCE, compute_score, problems, question
from recipes.tiny_arithmetic.teach import one_thread
from rollout.actor import remote_actor
from rollout.metrics import console_line
from rollout.sample import Sample

CHECKPOINT = Path(__file__).with_name("checkpoint")
PROMPTS, SAMPLES, RESPONSE_TOKENS, THRESHOLD = 16, 4, 240, 16  # problems a step, samples of each, their limit, T_h
LEARNING_RATE, CLIP, WAIT_S = 3e-4, 0.2, 600  # WAIT_S: of every call of the actor


@dataclass(frozen=True)
class Step:
    rewards: list[float]
    logprob_diff: float  # largest difference of a token's log-probability between rollout and trainer, same weights
    weight_version: int  # under which every token was drawn
    report: StepReport


def train(steps: int) -> Iterator[Step]:
    """`steps` steps of GRPO, each yielded when its weights have been sent. Starts and stops Ray and the engine.

    Raises RuntimeError for a response that the engine refused or cut off, and what the actor raises.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(CHECKPOINT)
    policy = Qwen3MoeForCausalLM.from_pretrained(CHECKPOINT)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE)
    draw, pairs = random.Random(0), problems(COUNT, seed=0)
    sampling = {"temperature": 1.0, "max_new_tokens": RESPONSE_TOKENS}
    server = {"skip_tokenizer_init": True, "random_seed": 0, "max_total_tokens": 16384, "log_level": "error"}
    ray.init(include_dashboard=False)
    actor = remote_actor(num_cpus=1).remote(str(CHECKPOINT), 2, {"threshold": THRESHOLD}, server)

    def call(method: str, *arguments: Any) -> Any:
        return ray.get(getattr(actor, method).remote(*arguments), timeout=WAIT_S)

    try:
        for number in range(steps):
            chosen = draw.sample(pairs, PROMPTS)
            chats = [[{"role": "user", "content": question(a, b)}] for a, b in chosen]
            prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
            call("begin_step", number, PROMPTS * SAMPLES)
            groups: list[list[Sample]] = call("generate_batch", prompts, SAMPLES, sampling)
            report = call("end_step")
            rows = [(prompt, sample) for prompt, group in zip(prompts, groups, strict=True) for sample in group]
            for _, sample in rows:
                if sample.finish_reason["type"] == "abort":
                    raise RuntimeError(f"response {sample.request_id} is not whole: {sample.finish_reason}")
            texts = [tokenizer.decode(sample.output_ids, skip_special_tokens=True) for _, sample in rows]
            sums = [str(a + b) for a, b in chosen for _ in range(SAMPLES)]
            scores = [compute_score(DATA_SOURCE, text, right)["score"] for text, right in zip(texts, sums, strict=True)]
            rewards = torch.tensor(scores).view(PROMPTS, SAMPLES)
            spread, mean = torch.std_mean(rewards, dim=1, keepdim=True)
            logprob_diff = update(policy, optimizer, rows, ((rewards - mean) / (spread + 1e-6)).flatten())
            call("update_weights", checkpoint_tensors(policy))
            yield Step(scores, logprob_diff, rows[0][1].weight_version_end, report)
    finally:
        call("shutdown")
        ray.shutdown()


@one_thread()
def update(policy: Any, optimizer: Any, rows: list[tuple[list[int], Sample]], advantages: torch.Tensor) -> float:
    """One step of the clipped policy gradient on (prompt, response) rows; returns Step.logprob_diff.

    Tokens and old log-probabilities are the rollout's own: nothing is tokenised again. advantages: [rows].
    """
    shape = len(rows), max(len(prompt) + len(sample.output_ids) for prompt, sample in rows)
    ids, valid, drawn = torch.zeros(3, *shape, dtype=torch.long)
    for row, (prompt, sample) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(sample.output_ids)
        ids[row, :end] = torch.tensor([*prompt, *sample.output_ids])
        valid[row, :end] = drawn[row, start:end] = 1
    logits = policy(input_ids=ids, attention_mask=valid).logits[:, :-1]  # those at t are for token t + 1
    new = torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None])[..., 0][drawn[:, 1:].bool()]
    old = torch.cat([torch.tensor(sample.logprobs) for _, sample in rows])
    ratio = (new - old).exp()  # 1 but for rounding, if all was drawn under these weights
    weight = advantages.repeat_interleave(drawn.sum(dim=1))
    loss = -torch.minimum(ratio * weight, ratio.clamp(1 - CLIP, 1 + CLIP) * weight).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return (new - old).abs().max().item()


def checkpoint_tensors(policy: Any) -> list[tuple[str, torch.Tensor]]:
    """The policy by the checkpoint's names: transformers holds all experts of a layer in one tensor, and splits them
    as save_pretrained does. Cloned, since a pickled view carries the whole tensor that it is a part of."""
    return [(name, tensor.clone()) for name, tensor in revert_weight_conversion(policy, policy.state_dict()).items()]


def main(steps: Annotated[int, typer.Option(min=1, help="GRPO steps.")] = 16) -> None:
    """Train the tiny model and print a line a step."""
    for step in train(steps):
        mean = sum(step.rewards) / len(step.rewards)
        print(f"reward {mean:.2f}, weights {step.weight_version}, logprobs within {step.logprob_diff:.0e}", end="; ")
        print(console_line(step.report), flush=True)


if __name__ == "__main__":
    typer.run(main)
