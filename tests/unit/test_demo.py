"""The demo, without an engine."""

import io
import json

import pytest
from rich.console import Console

from moebius_engine.telemetry import StepReport, read_json_lines
from rollout.demo import PAPER_CAP, SCALE, DemoSettings, response_lengths, run_demo
from tests.unit.stand_in_engine import StandInEngine, StopsEarly

SETTINGS = {"problems": 16, "samples": 2}


def demo(tmp_path, engine, **settings):
    """Exit code, what was printed, and the report."""
    stream = io.StringIO()
    settings = DemoSettings(out=tmp_path / "demo", **SETTINGS | settings)
    code = run_demo(settings, Console(file=stream, width=100), engine)
    return code, stream.getvalue(), json.loads((tmp_path / "demo" / "report.json").read_text())


def test_demo_reports_three_equal_runs(tmp_path):
    code, printed, report = demo(tmp_path, StandInEngine)
    assert code == 0, printed
    tokens = sum(response_lengths(32, seed=0))
    assert report.keys() == {"tokens_equal", "layouts"}
    assert report["tokens_equal"] is True
    assert list(report["layouts"]) == ["tp", "ep", "switching"]
    for name, layout in report["layouts"].items():
        assert layout.keys() == {"step_s", "burst_s", "tail_s", "tokens", "switches", "switch_ms"}
        assert layout["tokens"] == tokens
        assert layout["step_s"] == pytest.approx(layout["burst_s"] + layout["tail_s"])
        assert (layout["switches"], layout["switch_ms"]) == ((1, [5.0]) if name == "switching" else (0, []))
        (line,) = read_json_lines(tmp_path / "demo" / name / "steps.jsonl", StepReport)
        assert (line.responses, line.threshold) == (32, 4)
    assert (tmp_path / "demo" / "inflight.png").stat().st_size > 10_000
    for text in ("ms per switch", "requests in flight", "ep→tp in 5 ms", "On shared CPU cores", "Equal tokens"):
        assert text in printed


class OneTokenOff(StandInEngine):
    """Its third token of a long response is another one after a switch."""

    def token(self, prompt, position):
        return super().token(prompt, position) + (self.layout == "tp" and self._policy == "rollout" and position == 2)


class NeverSwitches(StandInEngine):
    def __init__(self, model_path, ranks, switch, **server_args):
        super().__init__(model_path, ranks, switch)
        self._policy = "ep"


@pytest.mark.parametrize(
    ("engine", "equal", "message"),
    [
        (OneTokenOff, False, "tokens differ between tp and switching: request"),
        (StopsEarly, False, "tp: request"),
        (NeverSwitches, True, "the switching run did not switch to TP"),
    ],
)
def test_demo_fails_with_a_reason(tmp_path, engine, equal, message):
    code, printed, report = demo(tmp_path, engine)
    assert code == 1
    assert "FAILED" in printed and message in printed
    assert report["tokens_equal"] is equal


def test_demo_stops_the_engine_when_a_run_breaks(tmp_path):
    engines = []

    class Breaks(StandInEngine):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            engines.append(self)

        async def async_begin_step(self, step, requests=None):
            raise RuntimeError("broken on purpose")

    with pytest.raises(RuntimeError, match="broken on purpose"):
        demo(tmp_path, Breaks)
    assert [engine.down for engine in engines] == [True]


def test_response_lengths_have_the_papers_shape():
    lengths = sorted(response_lengths(20_000, seed=3))
    assert lengths[10_000] == 12
    assert lengths[19_800] == pytest.approx(10_386 / SCALE, rel=0.1)
    assert lengths[0] >= 1
    assert lengths[-1] == PAPER_CAP // SCALE
    assert response_lengths(5, seed=1) == response_lengths(5, seed=1) != response_lengths(5, seed=2)
