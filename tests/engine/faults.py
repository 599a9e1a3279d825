"""A scheduler process that can be told to break its next switch, the control of every switch test, to find no memory,
and to count its tensors, its allocations, and what a switch computes in its scratch memory."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moebius_engine.memory.scratch import Scratch
from moebius_engine.sglang import aside, commands, process, switcher
from moebius_engine.transfer.mover import Mover

FAULTS = ("kv", "weights")
_allocations = [0]  # of device memory, within switches
_largest: dict[str, int] = {}  # operation → bytes of the largest tensor that it has made in the scratch, not aside
_watching = [False]


def run_scheduler_with_faults(*args, **kwargs) -> None:
    """As process.run_scheduler, plus these commands."""
    commands._HANDLERS["break_next_switch"] = _break_next_switch
    commands._HANDLERS["all_tensors"] = _all_tensors
    commands._HANDLERS["no_room_for_next_resume"] = _no_room_for_next_resume
    commands._HANDLERS["device_allocations"] = lambda scheduler: {"count": _allocations[0]}
    commands._HANDLERS["watch_scratch"] = _watch_scratch
    commands._HANDLERS["largest_in_scratch"] = lambda scheduler: dict(_largest)
    run = switcher.Switcher.run

    def counting(self, *arguments):
        before = _device_allocations()
        record = run(self, *arguments)
        _allocations[0] += _device_allocations() - before
        return record

    switcher.Switcher.run = counting
    process.run_scheduler(*args, **kwargs)


@contextmanager
def faulty_schedulers() -> Iterator[None]:
    """Engines that start within it take the commands above."""
    from moebius_engine import engine  # not at the head: the ranks import this module, and do not need it

    original = engine.run_scheduler
    engine.run_scheduler = run_scheduler_with_faults
    try:
        yield
    finally:
        engine.run_scheduler = original


def _watch_scratch(scheduler) -> dict:
    """From now on, note what switches compute."""
    Scratch.used = _watched(Scratch.used, on=True)
    aside.Aside.used = _watched(aside.Aside.used, on=False)
    for name in ("move_experts", "move_kv"):  # a GPU's own transfer makes no tensors
        setattr(Mover, name, _watch(False)(getattr(Mover, name)))
    return {}


class _Notes(TorchDispatchMode):
    """Of every new tensor, while the innermost _watch says so."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if _watching[-1] and isinstance(made, torch.Tensor):
            given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            if made.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in given}:  # no view
                _largest[str(func)] = max(_largest.get(str(func), 0), made.nbytes)
        return made


@contextmanager
def _watch(on: bool) -> Iterator[None]:
    _watching.append(on)
    try:
        yield
    finally:
        _watching.pop()


def _watched(used, on: bool):
    @contextmanager
    def using(self):
        with used(self), _watch(on), _Notes() if on else nullcontext():
            yield

    return using


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
    else:

        def move_weights(target) -> int:
            moved = type(steps).move_weights(steps, target)
            for layer in range(shape.layers):
                w13_EIH, _ = scheduler.tp_worker.arena.experts(target, layer)
                w13_EIH.copy_(torch.roll(w13_EIH, 1, 0))  # experts in each other's place
            del steps.move_weights
            return moved

        steps.move_weights = move_weights
    return {}


def _no_room_for_next_resume(scheduler) -> dict:
    """As on a GPU that something else has filled (tests/gpu/test_engine.py)."""
    occupation = scheduler.occupation

    def resume(tags) -> None:
        del occupation.resume
        raise MemoryError("rank 1: allocate 4096 bytes")

    occupation.resume = resume
    return {}


def _all_tensors(scheduler) -> dict:
    """Bytes behind all tensors of this process."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return {"bytes": sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())}


def _device_allocations() -> int:
    """How often torch has asked the CUDA driver for memory so far."""
    return torch.cuda.memory_stats().get("num_device_alloc", 0) if torch.cuda.is_available() else 0
