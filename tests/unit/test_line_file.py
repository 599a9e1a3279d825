"""A full disk: lines are left out as a whole, and come again when there is room."""

import logging
import resource
from contextlib import contextmanager

import pytest

from moebius_engine.telemetry import StepReport, StepTrace, read_json_lines
from rollout.line_file import LineFile
from rollout.metrics import JsonLinesSink
from rollout.phases import step_report


@contextmanager
def files_of_at_most(size: int):
    """The system takes no more bytes in a file, and of the last write a part, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [10, 14, 19])  # nothing of the second line, a part, all but a byte
def test_a_line_that_does_not_fit_is_left_out(tmp_path, room, caplog):
    file = LineFile(tmp_path / "lines", append=True)
    file.write("123456789\n")
    with files_of_at_most(room), caplog.at_level(logging.ERROR):
        file.write("abcdefghi\n")
        file.write("never\nthere\n")
        assert (tmp_path / "lines").read_text() == "123456789\n"
    assert file.missing == 2 and len(caplog.records) == 1
    file.write("again\n")
    file.close()
    assert (tmp_path / "lines").read_text() == "123456789\nagain\n"


def test_a_file_goes_on_or_begins_anew(tmp_path):
    path = tmp_path / "lines"
    for append, expected in [(True, "one\n"), (True, "one\none\n"), (False, "one\n")]:
        file = LineFile(path, append)
        file.write("one\n")
        file.close()
        assert path.read_text() == expected


def test_a_file_that_cannot_be_opened_is_an_error_at_once(tmp_path):
    with pytest.raises(IsADirectoryError):
        LineFile(tmp_path, append=True)


def test_reports_stay_readable(tmp_path):
    sink = JsonLinesSink(tmp_path / "steps.jsonl")
    reports = [step_report(StepTrace(step=step), [], threshold=1) for step in range(3)]
    sink.write(reports[0])
    size = (tmp_path / "steps.jsonl").stat().st_size
    with files_of_at_most(size + 100):
        sink.write(reports[1])
    sink.write(reports[2])
    sink.close()
    assert read_json_lines(tmp_path / "steps.jsonl", StepReport) == [reports[0], reports[2]]
