"""The process that runs math-verify: `python -m recipes.grading.worker`, a JSON line in, a JSON line out.

The time limit is the kernel's alarm with its default action, which ends this process. An exception from a signal
handler, which is how math-verify limits time, waits for the interpreter: SymPy evaluating 9^(9^9) is one call into C.
"""

import json
import logging
import resource
import signal
import sys

START_LIMIT_S = 120.0  # for the imports, on a busy machine
MEMORY_LIMIT = 4 << 30  # bytes of address space; beyond it an answer is a MemoryError


def grade(gold: str, answer: str) -> bool:
    """Whether math-verify finds the two LaTeX or plain texts equal. What it raises is raised."""
    from math_verify import parse, verify

    sides = [parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=True) for text in (gold, answer)]
    return bool(verify(*sides, timeout_seconds=None, raise_on_error=True))


def main() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, START_LIMIT_S)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, resource.getrlimit(resource.RLIMIT_AS)[1]))
    logging.disable()  # math-verify warns that the time limit is left to us
    replies, sys.stdout = sys.stdout, sys.stderr
    grade("1", "1")  # imports and caches
    signal.setitimer(signal.ITIMER_REAL, 0)
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
        reply: dict[str, bool | str]
        try:
            reply = {"equal": grade(request["gold"], request["answer"])}
        except Exception as error:  # a process boundary: the parent counts it
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
