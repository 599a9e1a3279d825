"""What a process of the engine logs."""

import logging

import pytest

from moebius_engine.sglang.process import show_warnings


@pytest.fixture
def logged(monkeypatch):
    """Lines that reach the root logger's handlers, at SGLang's level "error"."""
    root, lines = logging.getLogger(), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    monkeypatch.setattr(root, "handlers", [handler])
    monkeypatch.setattr(root, "level", logging.ERROR)
    monkeypatch.setattr(logging.getLogger("moebius_engine"), "level", logging.NOTSET)
    logging.getLogger("moebius_engine").manager._clear_cache()
    yield lines
    logging.getLogger("moebius_engine").manager._clear_cache()


@pytest.mark.parametrize(("log_level", "seen"), [("error", ["ours"]), ("critical", ["ours"]), ("info", [])])
def test_our_warnings_are_seen_though_sglang_logs_errors_only(logged, log_level, seen):
    """The line that says what calibration found, and that a slower transfer was taken, once went nowhere. Where SGLang
    logs more, the root logger has its level, and ours none of its own."""
    show_warnings(log_level)
    logging.getLogger("moebius_engine.calibration.start").warning("ours")
    logging.getLogger("sglang.srt").warning("theirs")
    assert logged == seen


def test_a_later_engine_that_logs_more_is_heard(logged, monkeypatch):
    show_warnings("error")
    show_warnings("info")
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    logging.getLogger("moebius_engine").manager._clear_cache()
    logging.getLogger("moebius_engine.transfer").info("ours")
    assert logged == ["ours"]
