"""A few math-verify processes that many threads share. One that runs past its time is gone, and replaced."""

import json
import queue
import signal
import subprocess
import sys
from enum import Enum


class Verdict(Enum):
    RIGHT = "right"
    WRONG = "wrong"
    TIMED_OUT = "timed out"
    FAILED = "failed"  # math-verify raised, ran out of memory, or its process died


class Grader:
    """Compares answers in at most `processes` processes, each started when it is first needed.

    Safe to call from any thread: SIGALRM, by which math-verify limits time, works in a main thread only, and verl calls
    rewards in others. A call waits for a free process, and then at most its limit.
    """

    def __init__(self, processes: int = 4) -> None:
        if processes < 1:
            raise ValueError(f"processes must be at least 1, got {processes}")
        self._slots: queue.LifoQueue[subprocess.Popen[str] | None] = queue.LifoQueue()
        for _ in range(processes):
            self._slots.put(None)

    def grade(self, gold: str, answer: str, limit_s: float) -> Verdict:
        """Compares two texts, LaTeX or plain, in at most `limit_s` seconds, not counting the start of a process.

        Raises RuntimeError if no process can be started: then no answer could ever be right.
        """
        if limit_s <= 0:
            raise ValueError(f"limit_s must be above 0 seconds, got {limit_s}")
        process = self._slots.get()
        try:
            process = process or _start()
            verdict = _ask(process, gold, answer, limit_s)
            if process.poll() is not None or verdict is Verdict.TIMED_OUT:
                process = None
            return verdict
        except BaseException:
            process = None
            raise
        finally:
            self._slots.put(process)

    def close(self) -> None:
        """Ends the processes that are not at work."""
        for _ in range(self._slots.qsize()):
            if process := self._slots.get():
                process.communicate()
            self._slots.put(None)


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "recipes.grading.worker"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"{' '.join(command)} did not start, exit code {process.wait()}; its reason is on stderr")
    return process


def _ask(process: subprocess.Popen[str], gold: str, answer: str, limit_s: float) -> Verdict:
    """One request. The process ends itself at the limit, so reading its reply needs no deadline."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps({"gold": gold, "answer": answer, "limit_s": limit_s}) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line.endswith("\n"):
        return Verdict.TIMED_OUT if process.wait() == -signal.SIGALRM else Verdict.FAILED
    reply = json.loads(line)
    if "error" in reply:
        return Verdict.FAILED
    return Verdict.RIGHT if reply["equal"] else Verdict.WRONG
