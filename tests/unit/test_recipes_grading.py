"""The math reward, with real math-verify processes: three are started in all."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.grading.grader import Grader, Verdict
from recipes.grading.reward import compute_score, final_answer

SLOW = "9^{9^{9^{9}}}"  # SymPy computes it: one call into C that no Python signal handler interrupts


@pytest.fixture(scope="module")
def grader():
    grader = Grader(processes=1)
    yield grader
    grader.close()


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("So it is $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("First \\boxed{1}, no: \\boxed{2}.", "2"),
        ("\\boxed{34}\n\nAnswer: 35", "35"),
        ("Answer: 35, that is \\boxed{34}", "34"),
        ("Answer: $-7$.\nThat was it.", "-7"),
        ("**Answer:** **12**", "12"),
        ("\\boxed {x \\in \\{1, 2\\}}", "x \\in \\{1, 2\\}"),
        ("Answer: 3\nThe response was cut here: \\boxed{4", "3"),
        ("\\boxed{}", ""),
        ("Answer:", ""),
        ("it is 34", ""),
        ("", ""),
    ],
)
def test_final_answer(response, answer):
    assert final_answer(response) == answer


@given(st.text(alphabet="\\{}boxed Answer:$\n12", max_size=60))
def test_final_answer_of_any_text_is_part_of_it(response):
    assert final_answer(response) in response


@given(st.integers(), st.text(alphabet=st.characters(exclude_characters="\\{}:"), max_size=40))
def test_final_answer_finds_the_box(number, before):
    assert final_answer(f"{before}\\boxed{{{number}}}") == str(number)


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("\\frac{1}{2}", "0.5", Verdict.RIGHT),
        ("x^2+1", "1+x^2", Verdict.RIGHT),
        ("2", "x=2", Verdict.RIGHT),
        ("Yes", "\\text{Yes}", Verdict.RIGHT),
        ("Yes", "No", Verdict.WRONG),
        ("(0,1)", "(0,2)", Verdict.WRONG),
        ("1", "\\begin{pmatrix}1 & ", Verdict.WRONG),
        ("", "1", Verdict.WRONG),
    ],
)
def test_grade(grader, gold, answer, verdict):
    assert grader.grade(gold, answer, limit_s=30) is verdict


def test_what_takes_too_long_is_a_timeout_and_the_next_answer_is_graded(grader):
    assert grader.grade("1", SLOW, limit_s=1) is Verdict.TIMED_OUT
    assert grader.grade("1", "1", limit_s=30) is Verdict.RIGHT


def test_a_process_that_dies_is_a_failure_and_the_next_answer_is_graded(grader):
    assert grader.grade("1", "1", limit_s=30) is Verdict.RIGHT
    process = grader._slots.queue[-1]
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(grader.grade("1", SLOW, limit_s=30)))
    thread.start()
    os.kill(process.pid, signal.SIGKILL)
    thread.join(60)
    assert verdicts == [Verdict.FAILED]
    assert grader.grade("1", "1", limit_s=30) is Verdict.RIGHT


def test_an_exception_is_a_reply_and_the_process_goes_on():
    program = (
        "from recipes.grading import worker\n"
        "def grade(gold, answer):\n"
        "    return {'1': lambda: True, '2': lambda: 1 / 0}[answer]()\n"
        "worker.grade = grade\n"
        "worker.main()\n"
    )
    requests = [{"gold": "1", "answer": answer, "limit_s": 30} for answer in ("2", "1")]
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run([sys.executable, "-c", program], input=lines, capture_output=True, text=True, timeout=120)
    ready, *replies = done.stdout.splitlines()
    assert (ready, done.returncode) == ("ready", 0), done.stderr
    assert [json.loads(reply) for reply in replies] == [
        {"error": "ZeroDivisionError: division by zero"},
        {"equal": True},
    ]


def test_bad_arguments_are_refused(grader):
    with pytest.raises(ValueError, match="processes must be at least 1, got 0"):
        Grader(processes=0)
    with pytest.raises(ValueError, match="limit_s must be above 0 seconds, got 0"):
        grader.grade("1", "1", limit_s=0)


def outcome(score, acc, answered=1.0, timed_out=0.0, failed=0.0):
    return {"score": score, "acc": acc, "answered": answered, "timed_out": timed_out, "failed": failed}


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (Verdict.RIGHT, outcome(1.0, 1.0)),
        (Verdict.WRONG, outcome(-1.0, 0.0)),
        (Verdict.TIMED_OUT, outcome(-1.0, 0.0, timed_out=1.0)),
        (Verdict.FAILED, outcome(-1.0, 0.0, failed=1.0)),
    ],
)
def test_score_of_each_verdict(monkeypatch, verdict, expected):
    monkeypatch.setattr(Grader, "grade", lambda self, gold, answer, limit_s: verdict)
    assert compute_score("any", "\\boxed{1}", "1", wrong=-1.0) == expected


def test_a_response_without_an_answer_starts_no_process(monkeypatch):
    monkeypatch.setattr(Grader, "grade", lambda *_: pytest.fail("no answer to grade"))
    assert compute_score("any", "I do not know.", "1") == outcome(0.0, 0.0, answered=0.0)
