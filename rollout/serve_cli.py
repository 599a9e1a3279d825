"""`moebius-rollout serve`: the switching engine behind SGLang's HTTP server."""

from typing import Annotated

import typer

from moebius_engine.config import SwitchConfig
from moebius_engine.vitals import EngineDead
from rollout.failure import check_policy, fail
from rollout.server_argument import server_argument

POLICIES = ("interactive", "ep", "tp")
_OPTIONS = ("model_path", "host", "port")  # server arguments that have an option of their own


def serve_command(
    model: Annotated[str, typer.Option(help="Folder or name of a Qwen3-MoE checkpoint.")],
    ranks: Annotated[int, typer.Option(help="P: processes that share the model.")] = 2,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 30000,
    policy: Annotated[str, typer.Option(help=f"One of {', '.join(POLICIES)}.")] = "interactive",
    threshold: Annotated[int | None, typer.Option(help="T_h, in requests in flight.")] = None,
    cooldown_s: Annotated[
        float | None, typer.Option(help="Seconds after a switch without another; 5 if left out.")
    ] = None,
    calibrate: Annotated[
        str, typer.Option(help="Where a threshold that is not given comes from: off, auto, file.")
    ] = "off",
    seeded: Annotated[bool, typer.Option("--seeded", help="Requests may give a seed.")] = False,
    share_gpu: Annotated[bool, typer.Option("--share-gpu", help="All ranks on GPU 0; needs MPS.")] = False,
    max_body_mb: Annotated[int, typer.Option(help="Longest body of a request, in MiB.")] = 64,
    max_samples: Annotated[int, typer.Option(help="Most samples of a request: prompts times n.")] = 16384,
    changes: Annotated[list[str] | None, typer.Option("--set", help="argument=value of SGLang's server.")] = None,
) -> None:
    """Serve a model over SGLang's HTTP routes, switching as the load changes, until SIGINT or SIGTERM.

    Besides SGLang's routes: GET /moebius/state, POST /moebius/switch with {"layout": "ep" or "tp"}, and
    POST /moebius/trace.
    """
    check_policy(policy, POLICIES)
    for option, most in (("max-body-mb", max_body_mb), ("max-samples", max_samples)):
        if most < 1:
            fail(f"--{option}={most}: at least 1")
    try:
        arguments = dict(map(server_argument, changes or []))
        for name in _OPTIONS:
            if name in arguments:
                raise ValueError(f"--set {name}={arguments[name]}: use its option, --{name.removesuffix('_path')}")
        config = SwitchConfig(
            policy=policy,  # type: ignore[arg-type]  # checked above
            threshold=threshold,
            cooldown_s=cooldown_s,
            calibrate=calibrate,  # type: ignore[arg-type]  # checked by SwitchConfig
            seeded=seeded,
            share_gpu=share_gpu,
        )
    except ValueError as error:
        fail(str(error))
    from moebius_engine.sglang.cpu import environment  # like the engine, too slow for --help

    if environment.is_needed():
        environment.prepare()  # before anything of SGLang is imported
    from moebius_engine.sglang.http import HttpEngine
    from moebius_engine.sglang.http_guard import RequestLimits

    limits = RequestLimits(body_bytes=max_body_mb << 20, samples=max_samples)
    try:
        engine = HttpEngine(model, ranks=ranks, switch=config, limits=limits, host=host, port=port, **arguments)
    except (ValueError, OSError) as error:  # OSError: transformers', of a checkpoint without its tokenizer
        fail(" ".join(str(error).split()))
    try:
        engine.serve(ready=lambda: typer.echo(f"{model} is served at {engine.server_args.url()} by {ranks} ranks"))
    except ValueError as error:  # the calibration that the configuration asks for
        fail(str(error))
    except EngineDead as error:
        fail(str(error), code=1)
    finally:
        engine.shutdown()
