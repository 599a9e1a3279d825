"""verl's plug-in entry point (`verl.plugins`): verl imports this module in every process that imports verl.

verl logs what an entry point raises at DEBUG only, and goes on. So a failure is printed here, and whoever then asks for
`rollout.name=moebius` gets it raised.
"""

import os
import sys
import traceback


def register() -> None:
    """Makes the changes of rows.ROWS, and where VERL_PLATFORM=cpu those of the CPU platform before them."""
    from rollout.verl_plugin import table
    from rollout.verl_plugin.rows import ROWS

    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        from rollout.verl_plugin.cpu.table import CPU_ROWS, prepare_process

        prepare_process()
        table.apply(CPU_ROWS)
    table.apply(ROWS)


def report(failure: Exception) -> None:
    """Says that the plug-in is not there, now and to whoever asks for it later."""
    print("moebius: the verl plug-in could not be loaded, rollout.name=moebius will not work", file=sys.stderr)
    traceback.print_exception(failure, file=sys.stderr)

    def load_replica():
        raise RuntimeError("rollout.name=moebius: the plug-in could not be loaded") from failure

    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register("moebius", load_replica)


try:
    register()
except Exception as failure:
    report(failure)
