"""Entry points of SGLang's processes: a rank's scheduler, and the controller that shares out requests to the ranks."""

import functools
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sglang.srt.entrypoints import engine
from sglang.srt.managers import data_parallel_controller
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from tqdm import tqdm

from moebius_engine.config import SwitchConfig
from moebius_engine.sglang import hooks, rendezvous
from moebius_engine.sglang.dispatch import DISPATCH_HOOKS
from moebius_engine.sglang.heartbeat import heartbeat_hooks, report_exits
from moebius_engine.vitals import RankVitals


def run_scheduler(
    tp_server_args: ServerArgs,
    config: SwitchConfig,
    server_args: ServerArgs,
    port_args,
    gpu_id: int,
    *args,
    vitals: Sequence[RankVitals],
) -> None:
    """Run SGLang's scheduler process with switching installed.

    tp_server_args: the TP layout's arguments. server_args: EP's; from it on, run_scheduler_process's own arguments.
    vitals: where the ranks show that they live.
    """
    load_plugins()
    # Imported after the plug-ins, which may replace classes that these modules subclass.
    from moebius_engine.sglang.table import switching_hooks

    own = (*switching_hooks(tp_server_args, config), *heartbeat_hooks(vitals))
    _run(own, config, server_args, port_args, gpu_id, *args)


def run_static_scheduler(
    config: SwitchConfig, server_args: ServerArgs, port_args, gpu_id: int, *args, vitals: Sequence[RankVitals]
) -> None:
    """Run SGLang's own scheduler process, which also answers the commands that only look (commands.STATIC_COMMANDS)."""
    load_plugins()
    from moebius_engine.sglang.table import STATIC_HOOKS

    _run((*STATIC_HOOKS, *heartbeat_hooks(vitals)), config, server_args, port_args, gpu_id, *args)


def _run(
    own: Sequence[hooks.Hook], config: SwitchConfig, server_args: ServerArgs, port_args, gpu_id: int, *args
) -> None:
    """Run SGLang's scheduler process with the hooks of this kind of engine and those of what the user has asked for."""
    hooks.apply((*own, *_chosen(config, server_args)))
    show_warnings(server_args.log_level)
    _take_nothing_to_give_back()
    if server_args.dist_init_addr is None:
        rendezvous.use_loopback(port_args.nccl_port)
    run_scheduler_process(server_args, port_args, server_args.base_gpu_id if config.share_gpu else gpu_id, *args)


def show_warnings(log_level: str) -> None:
    """This package's, such as which path was taken because another one failed, also where SGLang logs errors only, as
    it does here unless the user says otherwise."""
    quiet = logging.getLevelNamesMapping()[log_level.upper()] > logging.WARNING
    logging.getLogger("moebius_engine").setLevel(logging.WARNING if quiet else logging.NOTSET)


def _take_nothing_to_give_back() -> None:
    """A rank ends by SIGKILL (watch.py). What it leaves on the host is then given back by Python's resource tracker,
    which warns of a leak; so this process takes none of it."""
    tqdm.set_lock(threading.RLock())  # else a semaphore, so that processes do not draw over each other's bars
    # Shared memory for broadcast_object, which SGLang calls for pipelines and disaggregation only; both are refused.
    os.environ.setdefault("SGLANG_USE_MESSAGE_QUEUE_BROADCASTER", "false")


def _chosen(config: SwitchConfig, server_args: ServerArgs) -> list[hooks.Hook]:
    """Hooks of what the user has asked for, in either kind of engine."""
    from moebius_engine.sglang.fp32 import FP32_HOOKS
    from moebius_engine.sglang.seeds import SEED_HOOKS

    chosen: list[hooks.Hook] = []
    if server_args.device == "cuda" and server_args.dtype in ("float", "float32"):
        chosen += FP32_HOOKS
    if config.seeded:
        chosen += SEED_HOOKS
    if server_args.device == "cpu" and server_args.grammar_backend == "xgrammar":
        from moebius_engine.sglang.cpu.grammar import XGRAMMAR_HOOKS

        chosen += XGRAMMAR_HOOKS
    return chosen


def run_controller(vitals: Sequence[RankVitals], *args, **kwargs) -> None:
    """Run SGLang's data-parallel controller process, which upstream starts without loading plug-ins."""
    load_plugins()
    hooks.apply(DISPATCH_HOOKS)
    threading.Thread(target=report_exits, args=(vitals,), name="exits", daemon=True).start()
    data_parallel_controller.run_data_parallel_controller_process(*args, **kwargs)


@contextmanager
def controller_with_plugins(vitals: Sequence[RankVitals]) -> Iterator[None]:
    """Within it, sglang.Engine starts its controller by `run_controller`.

    No hook can do that: the new process would look the hooked function up by its upstream name, unhooked.
    """
    upstream = engine.run_data_parallel_controller_process
    engine.run_data_parallel_controller_process = functools.partial(run_controller, vitals)
    try:
        yield
    finally:
        engine.run_data_parallel_controller_process = upstream
