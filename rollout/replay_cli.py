"""`moebius-rollout replay`: a recorded step again, in another layout or with another threshold."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from moebius_engine.config import PAPER_THRESHOLD
from rollout.failure import check_policy, fail
from rollout.server_argument import server_argument

POLICIES = ("rollout", "ep", "tp")


def replay_command(
    file: Annotated[Path, typer.Argument(help="A step_N.jsonl of RolloutActor's dump_dir.")],
    model: Annotated[str, typer.Option(help="Folder of the checkpoint.")],
    ranks: Annotated[int, typer.Option(help="P: processes that hold the model.")] = 2,
    policy: Annotated[str, typer.Option(help=f"One of {', '.join(POLICIES)}.")] = "rollout",
    threshold: Annotated[int, typer.Option(help="T_h, in requests.")] = PAPER_THRESHOLD,
    lengths_only: Annotated[bool, typer.Option("--lengths-only", help="Random prompts of the same lengths.")] = False,
    changes: Annotated[list[str] | None, typer.Option("--set", help="argument=value of SGLang's server.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder whose steps.jsonl the reports are appended to.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Deadline of one step, in seconds.")] = 3600.0,
) -> None:
    """Run recorded requests again with the recorded response lengths, and report each step in a line.

    Exit code 1 if a response has another length, 2 for a file or an argument that does not fit.
    """
    check_policy(policy, POLICIES)
    if not file.is_file():
        fail(f"{file} is not a file")
    if timeout_s <= 0:
        fail(f"timeout_s must be above 0 seconds, got {timeout_s}")
    if out is not None and out.exists() and not out.is_dir():
        fail(f"out must be a folder, and {out} is a file; name another")
    from moebius_engine.checkpoint import read_hf_config
    from moebius_engine.config import SwitchConfig
    from moebius_engine.layout.shape import ModelShape, check_ranks
    from moebius_engine.sglang import arguments
    from rollout.metrics import console_line
    from rollout.replay.run import WrongLength, replay, started_actor
    from rollout.replay.workload import read_workloads

    try:
        server_args = dict(map(server_argument, changes or []))
        switch = SwitchConfig(policy=policy, threshold=threshold)  # type: ignore[arg-type]  # checked above
        shape = ModelShape.from_hf_config(read_hf_config(model, server_args))
        check_ranks(shape, ranks)
        arguments.check(ranks, server_args)
        arguments.check_machine(ranks)
        workloads = read_workloads(file, shape.vocab_size, lengths_only)
    except (ValueError, OSError) as error:
        fail(" ".join(str(error).split()))
    with ExitStack() as stack:
        try:
            actor, runner = stack.enter_context(started_actor(model, ranks, switch, server_args, out))
        except ValueError as error:
            fail(str(error))
        try:
            runner.run(replay(actor, workloads, timeout_s, lambda report: typer.echo(console_line(report))))
        except WrongLength as error:
            fail(str(error), code=1)
