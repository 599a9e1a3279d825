"""Server arguments of a switching engine: what it sets, what it refuses, and both layouts' ServerArgs."""

import ast
import dataclasses
import functools
import os
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moebius_engine.sglang.cpu import environment

# Set by the engine itself: giving them would contradict `ranks`.
_OURS = ("tp_size", "dp_size", "ep_size", "enable_dp_attention")

# Argument → (the one value that works with switching, why).
_ONLY = {
    "pp_size": (1, "a layout spans one pipeline stage"),
    "nnodes": (1, "the ranks share one host"),
    "speculative_algorithm": (None, "draft models have one layout"),
    "enable_lora": (False, "adapters have one layout"),
    "quantization": (None, "the arena holds unquantised experts"),
    "enable_eplb": (False, "it moves experts between ranks by itself"),
    "enable_mixed_chunk": (False, "a batch must be either prefill or decode when it is settled"),
    "enable_hierarchical_cache": (False, "host copies of KV have one layout"),
    "disaggregation_mode": ("null", "prefill and decode run in one engine"),
    "enable_dp_attention_local_control_broadcast": (False, "control messages go through the ranks' own exchange"),
    "enable_dp_lm_head": (False, "the output head is shared by both layouts"),
    "enable_strict_thinking": (False, "its filter's state has no rule for a switch"),
    "scheduler_recv_interval": (1, "the ranks agree on it by themselves"),
    "disable_piecewise_cuda_graph": (True, "graphs of prefill exist in TP only, which prefills little"),
    "enforce_piecewise_cuda_graph": (False, "see disable_piecewise_cuda_graph"),
    "moe_a2a_backend": ("none", "no DeepEP wheel works with torch 2.11: docs/deepep.md"),
    "enable_return_routed_experts": (False, "routes are recorded by KV row, which a switch changes"),
    "detokenizer_worker_num": (1, "outputs are put in order before one detokenizer"),
    "tokenizer_worker_num": (1, "commands go through one tokenizer manager"),
    "enable_http2": (False, "the HTTP server shares its process with the engine"),
    "enable_ssl_refresh": (False, "the HTTP server reads its certificate once"),
}

# Of SGLang, from the environment, in any of their names.
_TIMEOUTS = (
    "SGLANG_REQ_WAITING_TIMEOUT",
    "SGLANG_REQ_RUNNING_TIMEOUT",
    "SGLANG_QUEUED_TIMEOUT_MS",
    "SGLANG_FORWARD_TIMEOUT_MS",
)

# Of the HTTP server, which keeps them to itself (http.py): SGLang logs and shows its arguments, and hands them to every
# process.
SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")


def check(ranks: int, arguments: dict[str, Any]) -> None:
    """Raise ValueError for an argument that a switching engine cannot honour, before anything starts."""
    for name in _OURS:
        if name in arguments:
            raise ValueError(f"{name}={arguments[name]!r}: a switching engine sets it from ranks={ranks}; leave it out")
    for name, (value, why) in _ONLY.items():
        if name in arguments and arguments[name] != value:
            raise ValueError(f"{name}={arguments[name]!r}: only {value!r} works with switching ({why})")
    for name in _TIMEOUTS:
        if float(os.environ.get(name) or -1) > 0:
            raise ValueError(
                f"{name}={os.environ[name]}: each rank would end requests by a clock of its own, and in TP all must "
                "have the same; unset it, and abort requests from outside"
            )
    for name in SECRETS:
        if arguments.get(name) is not None:
            raise ValueError(f"{name} belongs to an HTTP server, and this engine has none: leave it out")


@functools.cache
def text_arguments() -> frozenset[str]:
    """Server arguments of SGLang that are text, read from its source, since importing it takes seconds."""
    package = find_spec("sglang")
    assert package is not None and package.submodule_search_locations
    source = Path(package.submodule_search_locations[0], "srt", "server_args.py").read_text(encoding="utf-8")
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    arguments = next(node for node in classes if node.name == "ServerArgs")
    fields = (node for node in arguments.body if isinstance(node, ast.AnnAssign))
    texts = (node for node in fields if ast.unparse(node.annotation) in ("str", "Optional[str]"))
    return frozenset(ast.unparse(node.target) for node in texts)


def check_machine(ranks: int, share_gpu: bool = False) -> None:
    """Raise ValueError if this machine cannot hold that many ranks."""
    if share_gpu:
        return
    if environment.is_needed():
        most, what = 4 * len(os.sched_getaffinity(0)), "four times its cores"
    else:
        import torch

        most, what = torch.cuda.device_count(), "its GPUs"
    if ranks > most:
        advice = f"use ranks={most} or fewer"
        if most == 1:  # only a GPU can be that few
            advice = "let them share it (share_gpu), or hide it (CUDA_VISIBLE_DEVICES=) to run on the CPU"
        raise ValueError(f"ranks={ranks} is more than this machine's {most} ({what}); {advice}")


def both_layouts(ranks: int, arguments: dict[str, Any], timeout_s: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """The user's arguments completed for EP and for TP; each is to go through ServerArgs' own __post_init__.

    Raises ValueError for one that ServerArgs does not have.
    """
    from sglang.srt.server_args import ServerArgs

    if unknown := sorted(arguments.keys() - {field.name for field in dataclasses.fields(ServerArgs)}):
        raise ValueError(f"{unknown} are no server arguments of SGLang: see sglang.srt.server_args.ServerArgs")
    platform = environment.ENGINE_ARGUMENTS if environment.is_needed() else {}
    common = {
        "log_level": "error",
        "random_seed": random.SystemRandom().randrange(1 << 30),
        "load_balance_method": "round_robin",
        "dist_timeout": round(timeout_s),
        # Not of use here (see above), but SGLang's default in TP. It has none with EP's data-parallel attention.
        "disable_piecewise_cuda_graph": True,
        **platform,
        **arguments,
    }
    return (
        {**common, "tp_size": ranks, "dp_size": ranks, "ep_size": ranks, "enable_dp_attention": True},
        {**common, "tp_size": ranks, "dp_size": 1, "ep_size": 1},
    )
