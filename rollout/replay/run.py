"""Runs the steps of a dump again, in the layout that is asked for."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moebius_engine.config import SwitchConfig
from moebius_engine.telemetry import StepReport
from rollout.actor import RolloutActor
from rollout.replay.workload import Workload


class WrongLength(RuntimeError):
    """A response does not have the recorded length, so the step was not the recorded one."""


@contextmanager
def started_actor(
    model: str, ranks: int, switch: SwitchConfig, server_args: Mapping[str, Any], out: Path | None
) -> Iterator[tuple[RolloutActor, asyncio.Runner]]:
    """An actor in this process and the loop that its calls must run in. out: the actor's metrics_dir."""
    with asyncio.Runner() as runner:
        asyncio.set_event_loop(runner.get_loop())  # SGLang takes the current loop at its start
        arguments = {"skip_tokenizer_init": True, "log_level": "error", **server_args}
        actor = RolloutActor(model, ranks, switch, arguments, metrics_dir=out)
        try:
            yield actor, runner
        finally:
            actor.shutdown()


async def replay(
    actor: RolloutActor,
    workloads: Sequence[Workload],
    timeout_s: float,
    report: Callable[[StepReport], None] = lambda report: None,
) -> None:
    """Runs each step, all of its requests sent at once, and calls `report` at its end.

    timeout_s: of one step. Raises WrongLength if a response has another length than the recorded one.
    """
    # Two tokens of something else first: what happens once in a process is no part of a step.
    await actor.generate_batch([[0] * 16], sampling={"max_new_tokens": 2, "ignore_eos": True}, timeout_s=timeout_s)
    for workload in workloads:
        await actor.begin_step(workload.step, requests=len(workload.prompts))
        batch = await actor.generate_batch(workload.prompts, sampling=workload.sampling, timeout_s=timeout_s)
        ended = await actor.end_step()
        for number, ((sample,), length) in enumerate(zip(batch, workload.lengths, strict=True)):
            if len(sample.output_ids) != length:
                raise WrongLength(
                    f"step {workload.step}: request {number} has {len(sample.output_ids)} of {length} tokens and "
                    f"ended with {sample.finish_reason}"
                )
        report(ended)
