"""How a wait for another rank ends, with real processes and gloo: what protocol_model.py assumes."""

import multiprocessing
import os
import re
import signal
from datetime import timedelta

import pytest
import torch.distributed as dist

from moebius_engine.exchange import agree, exchange

CLOSED = "Connection (closed|reset) by peer"
START_S, DEADLINE_S = 120, 2  # of the start on a busy machine, and of the group under test


def run_rank(rank: int, store: str, told, wait, leave) -> None:
    """Agree once; then rank 1 leaves by `leave` and rank 0 waits for it in `wait`."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=START_S)
    )
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=START_S))
    answers = [agree(None, group), agree("full" if rank else None, group), agree(f"reason {rank}", group)]
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=DEADLINE_S))
    dist.barrier(group)
    if rank == 1:
        leave()
    try:
        wait(None, group)
    except RuntimeError as error:
        told.send((answers, str(error)))
    else:
        told.send((answers, "no error"))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize(
    ("wait", "leave", "error"),
    [
        (agree, die, CLOSED),
        (agree, fail, CLOSED),
        (agree, stop, "Timed out"),
        (exchange, stop, "Timed out"),
    ],
)
def test_a_rank_that_leaves_is_an_error_on_the_other(wait, leave, error, tmp_path):
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=run_rank, args=(rank, str(tmp_path / "store"), sender, wait, leave), daemon=True)
        for rank in range(2)
    ]
    try:
        for process in ranks:
            process.start()
        assert receiver.poll(2 * START_S), "rank 0 still waits"
        answers, seen = receiver.recv()
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert answers == [None, "rank 1: full", "rank 0: reason 0; rank 1: reason 1"]
    assert re.search(error, seen)
