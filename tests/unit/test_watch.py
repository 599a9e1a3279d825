"""The watch over real processes that only sleep: who is named, who is ended, and which calls fail."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from moebius_engine.sglang.heartbeat import report_exits
from moebius_engine.sglang.watch import Watch, outlive_sigquit
from moebius_engine.vitals import EngineDead, make_vitals

FORK = multiprocessing.get_context("fork")  # at once; the children only sleep


@pytest.fixture
def start():
    """Starts processes, and a watch over them: the first is the controller's place, the second the detokenizer's."""
    started = []

    def make(silent_s=60.0, dp_size=2):
        processes = [FORK.Process(target=time.sleep, args=(600,)) for _ in range(2)]
        for process in processes:
            process.start()
        started.extend(processes)
        upstream = SimpleNamespace(_processes=processes, _names=["scheduler_0", "detokenizer"])
        state = SimpleNamespace(output_ids=[4, 5, 6], output_token_logprobs_val=[-0.5, -1.0])
        manager = SimpleNamespace(server_args=SimpleNamespace(dp_size=dp_size), rid_to_state={"a": state})
        vitals = make_vitals(2)
        watch = Watch(upstream, vitals, [process.pid for process in processes], manager, silent_s, 60.0)
        watch.start()
        return watch, processes, vitals

    yield make
    for process in started:
        process.kill()
        process.join()


async def chunks():
    yield 1
    await asyncio.sleep(600)


async def test_a_killed_process_fails_every_call_and_ends_the_others(start):
    watch, processes, _ = start()
    os.kill(processes[0].pid, signal.SIGSTOP)  # the others are ended even if they are stopped
    stream = watch.each(chunks())
    assert await anext(stream) == 1
    calls = [
        asyncio.ensure_future(watch.until_dead(asyncio.sleep(600))),
        asyncio.ensure_future(watch.until_dead(asyncio.Event().wait(), 500.0)),
        asyncio.ensure_future(anext(stream)),
    ]
    assert await watch.until_dead(asyncio.sleep(0, "answer")) == "answer"
    await asyncio.sleep(0.4)
    assert watch.dead is None and not any(call.done() for call in calls)
    os.kill(processes[1].pid, signal.SIGKILL)
    error = rf"detokenizer \(pid {processes[1].pid}\) was ended by SIGKILL \(exit code -9\)"
    for call in calls:
        with pytest.raises(EngineDead, match=error):
            await asyncio.wait_for(call, 5)
    assert await watch.wait_dead() is watch.dead
    with pytest.raises(EngineDead, match=error):
        await watch.until_dead(asyncio.sleep(0))
    assert not psutil.wait_procs([psutil.Process(p.pid) for p in processes if p.is_alive()], timeout=5)[1]
    assert watch.so_far("a") == ([4, 5, 6], [-0.5, -1.0]) and watch.so_far("b") == ([], [])


async def test_an_answer_an_error_a_deadline_and_a_cancelled_call_stay_what_they_are(start):
    watch, _, _ = start()

    async def fails():
        raise KeyError("x")

    async def gives_up():
        raise TimeoutError("its own")

    with pytest.raises(KeyError):
        await watch.until_dead(fails())
    with pytest.raises(TimeoutError, match="its own"):
        await watch.until_dead(gives_up(), 5.0, lambda: "ours")
    with pytest.raises(TimeoutError, match="ours"):
        await watch.until_dead(asyncio.sleep(600), 0.05, lambda: "ours")
    inner = asyncio.ensure_future(asyncio.sleep(600))
    call = asyncio.ensure_future(watch.until_dead(inner))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0)
    assert inner.cancelled() and not watch._calls
    assert [chunk async for chunk in watch.each(two())] == [1, 2]


async def two():
    yield 1
    yield 2


async def test_shutdown_fails_the_calls_that_wait(start):
    watch, processes, _ = start()
    call = asyncio.ensure_future(watch.until_dead(asyncio.sleep(600)))
    await asyncio.sleep(0)
    watch.close()
    with pytest.raises(EngineDead, match="has been shut down"):
        await asyncio.wait_for(call, 5)
    assert not any(process.is_alive() for process in processes)
    watch.close()


def findings(watch) -> str:
    return "; ".join(watch._findings())


def test_the_cause_is_named_and_not_what_follows(start):
    watch, processes, vitals = start()
    watch.stop()
    assert findings(watch) == ""
    for vital in vitals:
        vital.beat_s = time.monotonic()
    vitals[0].pid = vitals[1].pid = 1 << 22  # above any pid
    assert findings(watch).count("has ended; its exit code is not known") == 2
    processes[1].kill()
    processes[1].join()
    assert findings(watch).startswith(
        f"detokenizer (pid {processes[1].pid}) was ended by SIGKILL (exit code -9); rank 0"
    )
    vitals[0].failure = b"RuntimeError: Connection reset by peer"
    assert findings(watch).startswith("rank 0 (pid 4194304) failed: RuntimeError")
    assert "rank 1 (pid 4194304) has ended" in findings(watch)  # perhaps the cause
    vitals[1].exit_code, vitals[1].ended = -9, 1
    processes[0].kill()
    processes[0].join()  # the controller, by what a failing rank sends it
    assert findings(watch) == (
        "rank 1 (pid 4194304) was ended by SIGKILL (exit code -9); "
        "rank 0 (pid 4194304) failed: RuntimeError: Connection reset by peer"
    )


def test_a_rank_without_a_controller_is_named_with_its_exit_code(start):
    watch, processes, vitals = start(dp_size=1)
    watch.stop()
    vitals[0].pid = processes[0].pid
    processes[0].kill()
    processes[0].join()
    assert findings(watch) == f"rank 0 (pid {processes[0].pid}) was ended by SIGKILL (exit code -9)"


async def test_silence_is_a_death(start):
    watch, _, _ = start(silent_s=2.0)
    with pytest.raises(EngineDead, match=r"rank 0 .* no sign of life for 2.* rank 1"):
        await asyncio.wait_for(watch.until_dead(asyncio.sleep(600)), 20)


def test_a_parent_writes_down_how_its_child_ended(monkeypatch):
    vitals = make_vitals(2)
    child = FORK.Process(target=time.sleep, args=(600,))
    child.start()
    vitals[1].pid = child.pid

    def children():
        if vitals[1].ended:
            raise SystemExit  # of the thread
        return [child]

    monkeypatch.setattr(multiprocessing, "active_children", children)
    thread = threading.Thread(target=report_exits, args=(vitals,), daemon=True)
    thread.start()
    os.kill(child.pid, signal.SIGKILL)
    thread.join(20)
    assert (vitals[1].exit_code, vitals[1].ended, vitals[0].ended) == (-9, 1, 0)


def test_sigquit_of_a_child_is_outlived_also_from_a_thread_and_not_inherited():
    thread = threading.Thread(target=outlive_sigquit)
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGQUIT)  # without the handler that would be the end of this run
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    child.send_signal(signal.SIGQUIT)
    assert child.wait(20) == -signal.SIGQUIT
