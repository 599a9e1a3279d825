"""Entry point of a rank's scheduler process."""

from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from moebius_engine.config import SwitchConfig
from moebius_engine.sglang import hooks


def run_scheduler(tp_server_args: ServerArgs, config: SwitchConfig, *args) -> None:
    """Run SGLang's scheduler process with switching installed.

    tp_server_args: the TP layout's arguments; EP's are the first of `args`, which are run_scheduler_process's own.
    """
    load_plugins()
    # Imported after the plug-ins, which may replace classes that these modules subclass.
    from moebius_engine.sglang.table import switching_hooks

    hooks.apply(switching_hooks(tp_server_args, config))
    run_scheduler_process(*args)


def run_static_scheduler(*args) -> None:
    """Run SGLang's own scheduler process, which also answers the commands that only look (commands.STATIC_COMMANDS)."""
    load_plugins()
    from moebius_engine.sglang.table import STATIC_HOOKS

    hooks.apply(STATIC_HOOKS)
    run_scheduler_process(*args)
