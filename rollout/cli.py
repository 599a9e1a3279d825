"""The command `moebius-rollout`. What takes seconds to import is imported by the command that needs it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rollout.budget_cli import budget_command
from rollout.calibrate_cli import calibrate_command
from rollout.failure import fail
from rollout.plan_cli import plan_command
from rollout.recipe_cli import recipe_command
from rollout.replay_cli import replay_command
from rollout.report_cli import report_command
from rollout.serve_cli import serve_command
from rollout.server_argument import server_argument
from rollout.simulate_cli import simulate_command
from rollout.soak_cli import soak_command
from rollout.train_cli import train_command

# Plain messages: an error is one line that begins with "Error:", also in a log.
VERIFY_DTYPES = ("float32", "bfloat16")

app = typer.Typer(
    help="RL rollouts for mixture-of-experts models, switching between expert and tensor parallelism in mid-rollout.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="Processes that hold the model: 2 or 4.")] = 2,
    problems: Annotated[int, typer.Option(help="Problems in the batch, at most 64.")] = 64,
    samples: Annotated[int, typer.Option(help="Responses to each problem.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the model's weights and the response lengths.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the report, the picture and the metrics.")] = Path("runs/demo"),
) -> None:
    """Run one rollout step on the CPU in static TP, static EP and switching, and compare times and tokens.

    Exit code 1 if the tokens differ or the switch did not happen.
    """
    from rich.console import Console

    from moebius_engine.sglang.cpu import environment

    environment.choose()
    from rollout.demo import DemoSettings, run_demo

    try:
        settings = DemoSettings(ranks=ranks, problems=problems, samples=samples, seed=seed, out=out)
    except ValueError as error:
        fail(str(error))
    raise typer.Exit(run_demo(settings, Console()))


@app.command()
def verify(
    switches: Annotated[int, typer.Option(help="How often to switch, both ways in turn.")] = 20,
    ranks: Annotated[int, typer.Option(help="Processes that hold the model.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32 compares tokens; bfloat16 teacher-forced logprobs.")] = "float32",
    share_gpu: Annotated[bool, typer.Option("--share-gpu", help="All ranks on GPU 0; needs MPS.")] = False,
    model: Annotated[str | None, typer.Option(help="A checkpoint; a small random model if left out.")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="argument=value of SGLang's server.")] = None,
) -> None:
    """Switch with requests in flight, and compare weights, KV, tokens and logprobs with what was never switched.

    Ends with one line of JSON. Exit code 1 on any difference.
    """
    if switches < 1:
        fail(f"switches must be at least 1, got {switches}")
    if ranks < 2:
        fail(f"ranks must be at least 2, got {ranks}; with one there is nothing to switch")
    from moebius_engine.sglang.arguments import check_machine
    from rollout.verify import run

    if dtype not in VERIFY_DTYPES:
        fail(f"dtype={dtype!r} is unknown; use one of {list(VERIFY_DTYPES)}")
    try:
        check_machine(ranks, share_gpu)
        arguments = dict(map(server_argument, changes or []))
        result = run(
            switches=switches, ranks=ranks, dtype=dtype, share_gpu=share_gpu, model=model, server_args=arguments
        )
    except ValueError as error:
        fail(str(error))
    typer.echo(json.dumps(result))
    raise typer.Exit(0 if result["ok"] else 1)


app.command("budget")(budget_command)
app.command("calibrate")(calibrate_command)
app.command("plan")(plan_command)
app.command("recipe")(recipe_command)
app.command("report")(report_command)
app.command("train")(train_command)
app.command("replay")(replay_command)
app.command("serve")(serve_command)
app.command("simulate")(simulate_command)
app.command("soak")(soak_command)


if __name__ == "__main__":
    app()
