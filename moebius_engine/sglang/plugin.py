"""SGLang's plug-in entry point (`sglang.srt.plugins`), called by SGLang in every engine and scheduler process."""

from moebius_engine.sglang.cpu import environment


def register() -> None:
    """Register the CPU platform's hooks where there is no CUDA device, nothing elsewhere.

    Switching is not installed here but in the scheduler processes of a SwitchingEngine alone (process.py), so a
    stock engine in an environment with this package behaves as without it.
    """
    if environment.is_needed():
        from moebius_engine.sglang import hooks
        from moebius_engine.sglang.cpu.table import CPU_HOOKS

        hooks.register(CPU_HOOKS)
