"""compute_score: what verl calls for each response (`reward.custom_reward_function`)."""

import re
from functools import cache
from typing import Any

from recipes.grading.grader import Grader, Verdict

_MARK = re.compile(r"\\boxed\s*\{|answer\s*:", re.IGNORECASE)


def final_answer(response: str) -> str:
    """The content of the last \\boxed{...}, or the rest of the line of the last "Answer:", whichever begins later.

    Empty if there is neither, or nothing in it. A box without its closing brace, as in a cut response, is no answer.
    """
    for mark in reversed(list(_MARK.finditer(response))):
        if mark[0].endswith("{"):
            end = _closing_brace(response, mark.end())
            if end is None:
                continue
            answer = response[mark.end() : end]
        else:
            answer = response[mark.end() :].partition("\n")[0]
        return answer.strip().strip("$*").strip().removesuffix(".").strip("$*").strip()
    return ""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    *,
    limit_s: float = 5.0,
    wrong: float = 0.0,
) -> dict[str, float]:
    """1 for a right answer, `wrong` for any other, with what happened as numbers that reach verl's metrics.

    acc: 1 if right. answered: 1 if the response has an answer. timed_out: 1 if comparing took over `limit_s` seconds.
    failed: 1 if math-verify raised or died. A response without an answer, a timeout and a failure are all not right.
    """
    answer = final_answer(solution_str)
    verdict = _grader().grade(ground_truth, answer, limit_s) if answer else Verdict.WRONG
    right = verdict is Verdict.RIGHT
    return {
        "score": 1.0 if right else wrong,
        "acc": float(right),
        "answered": float(bool(answer)),
        "timed_out": float(verdict is Verdict.TIMED_OUT),
        "failed": float(verdict is Verdict.FAILED),
    }


@cache
def _grader() -> Grader:
    return Grader()


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for index in range(start, len(text)):
        if text[index - 1] == "\\":
            continue
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return None
