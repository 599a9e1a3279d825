"""A scheduler process that can be told to break its next switch: the control of every switch test."""

import torch

from moebius_engine.sglang import commands, process, switcher

FAULTS = ("kv", "weights", "verify")


def run_scheduler_with_faults(*args) -> None:
    """As process.run_scheduler, plus the command "break_next_switch"."""
    commands._HANDLERS["break_next_switch"] = _break_next_switch
    process.run_scheduler(*args)


def _break_next_switch(scheduler, fault: str) -> dict:
    assert fault in FAULTS
    steps: switcher.Switcher = scheduler.switcher
    shape = scheduler.tp_worker.shape

    if fault == "kv":

        def move_kv() -> int:
            moved = type(steps).move_kv(steps)
            for layer in range(shape.layers):
                for buffer_TKD in scheduler.tp_worker.arena.kv(steps._plan.target, layer):
                    buffer_TKD.zero_()
            del steps.move_kv
            return moved

        steps.move_kv = move_kv
    elif fault == "weights":

        def move_weights() -> int:
            moved = type(steps).move_weights(steps)
            for layer in range(shape.layers):
                w13_EIH, _ = scheduler.tp_worker.arena.experts(steps._plan.target, layer)
                w13_EIH.copy_(torch.roll(w13_EIH, 1, 0))  # experts in each other's place
            del steps.move_weights
            return moved

        steps.move_weights = move_weights
    else:

        def verify() -> str | None:
            del steps.verify
            return "broken on purpose" if scheduler.tp_rank == 1 else None

        steps.verify = verify
    return {}
