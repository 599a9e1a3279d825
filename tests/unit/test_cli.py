"""The command line, and the demo behind it, without an engine.

`StandInEngine` knows the part of SwitchingEngine that RolloutActor calls, and hands out made-up tokens. What holds it
to the real one is tests/engine/test_actor.py, which checks every call that it answers on a real engine.
"""

import asyncio
import io
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from moebius_engine.telemetry import StepReport, StepTrace, SwitchRecord, TraceSample, read_json_lines
from moebius_engine.vitals import State
from rollout.actor import RolloutActor
from rollout.cli import app
from rollout.demo import PAPER_CAP, SCALE, DemoSettings, response_lengths, run_demo

SETTINGS = {"problems": 16, "samples": 2}


class StandInEngine:
    """A token a millisecond and request; the tokens depend on the prompt only. Switches once as the policy would."""

    def __init__(self, model_path, ranks, switch, **server_args):
        self.config = switch
        self._policy, self._threshold = switch.policy, switch.high
        self.layout = "tp" if switch.policy == "tp" else "ep"
        self._live: dict[str, asyncio.Event] = {}
        self._step, self.down = 0, False
        self._begin()

    def _begin(self):
        self._began, self._tokens, self._samples, self._switches = time.monotonic(), 0, [], []

    def _sample(self):
        t_s, inflight = time.monotonic() - self._began, len(self._live)
        peak = max((sample.inflight for sample in self._samples), default=0)
        if self._policy == "rollout" and self.layout == "ep" and 0 < inflight < self._threshold <= peak:
            self.layout = "tp"
            counts = {"running": inflight, "waiting": 0, "prefilling": 0, "kv_tokens": 1, "forward_ct": 0}
            times = dict.fromkeys(("decide_ms", "metadata_ms", "kv_ms", "weights_ms", "rest_ms"), 1.0)
            moved = {"total_ms": 5.0, "kv_bytes": 8, "weight_bytes": 8, "started_at_s": t_s, "step": self._step}
            self._switches.append(SwitchRecord(source="ep", target="tp", reason="policy", **counts, **times, **moved))
        self._samples.append(TraceSample(t_s=t_s, inflight=inflight, tokens=self._tokens, layout=self.layout))

    def token(self, prompt, position):
        return (sum(prompt) + 7 * position) % 500

    async def async_generate(self, input_ids, sampling_params, rid, return_logprob):
        if not input_ids:
            return answer([], {"type": "abort", "message": "input_ids is empty", "status_code": 400})
        stopped = self._live[rid] = asyncio.Event()
        self._sample()
        wanted = sampling_params["max_new_tokens"]
        began = time.monotonic()
        try:
            await asyncio.wait_for(stopped.wait(), wanted / 1000)
            count = min(wanted, int(1000 * (time.monotonic() - began)))
            reason = {"type": "abort", "message": "aborted"}
        except TimeoutError:
            count, reason = wanted, {"type": "length", "length": wanted}
        del self._live[rid]
        self._tokens += count
        self._sample()
        return answer([self.token(input_ids, position) for position in range(count)], reason)

    def state(self):
        return State.READY

    async def async_wait_dead(self):
        await asyncio.Event().wait()

    async def async_begin_step(self, step, requests=None):
        self._step = step
        self._begin()

    async def async_end_step(self):
        self._sample()
        return StepTrace(step=self._step, samples=self._samples, switches=self._switches)

    async def async_abort(self, rid="", abort_all=False):
        for name, stopped in self._live.items():
            if abort_all or name == rid:
                stopped.set()

    def shutdown(self):
        self.down = True


def answer(tokens, reason):
    logprobs = [(-1.0, token, None) for token in tokens]
    return {"output_ids": tokens, "meta_info": {"finish_reason": reason, "output_token_logprobs": logprobs}}


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


class StopsEarly(StandInEngine):
    async def async_generate(self, input_ids, sampling_params, **rest):
        length = sampling_params["max_new_tokens"]
        return await super().async_generate(input_ids, {"max_new_tokens": length - (length > 20)}, **rest)


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


# ---- the actor's own decisions


@pytest.fixture
def actor(tmp_path):
    return RolloutActor("unused", switch={"threshold": 4}, metrics_dir=tmp_path, engine_factory=StandInEngine)


async def test_a_refused_row_fails_alone(actor):
    good, bad = await actor.generate_batch([[1, 2], []], n=2, sampling={"max_new_tokens": 3})
    assert [len(sample.output_ids) for sample in good + bad] == [3, 3, 0, 0]
    assert bad[0].finish_reason["status_code"] == 400
    assert good[0].logprobs == [-1.0] * 3


async def test_at_the_deadline_unfinished_rows_keep_their_tokens(actor):
    lengths = [{"max_new_tokens": 5}, {"max_new_tokens": 60_000}]
    (short,), (long,) = await actor.generate_batch([[1], [2]], sampling=lengths, timeout_s=0.2)
    assert short.finish_reason["type"] == "length"
    assert long.finish_reason["type"] == "abort" and 0 < len(long.output_ids) < 60_000
    assert actor.progress() == {"total": 2, "done": 2, "inflight": 0}


async def test_an_engine_that_ignores_the_abort_is_an_error():
    class Deaf(StandInEngine):
        async def async_abort(self, rid="", abort_all=False):
            pass

    actor = RolloutActor("unused", switch={"timeout_s": 0.1}, engine_factory=Deaf)
    with pytest.raises(TimeoutError, match=r"1 of 1 requests were aborted after 0\.1 s and did not end within 0\.1 s"):
        await actor.generate_batch([[1]], sampling={"max_new_tokens": 60_000}, timeout_s=0.1)


async def test_a_broken_engine_fails_the_batch_and_stops_the_rest():
    class Breaks(StandInEngine):
        async def async_generate(self, input_ids, **rest):
            if input_ids == [13]:
                raise RuntimeError("rank 1 is gone")
            return await super().async_generate(input_ids, **rest)

    actor = RolloutActor("unused", engine_factory=Breaks)
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        await actor.generate_batch([[1], [13]], sampling={"max_new_tokens": 60_000})
    await asyncio.sleep(0.05)
    assert actor.progress()["inflight"] == 0


async def test_a_cancelled_batch_aborts_its_requests(actor):
    batch = asyncio.create_task(actor.generate_batch([[1]], sampling={"max_new_tokens": 60_000}))
    await asyncio.sleep(0.05)
    assert actor.progress()["inflight"] == 1
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    await asyncio.sleep(0.05)
    assert actor.progress()["inflight"] == 0


async def test_abort_means_exactly_these_ids(actor):
    batch = asyncio.create_task(
        actor.generate_batch([[1], [2]], sampling={"max_new_tokens": 300}, request_ids=["a", "ab"])
    )
    await asyncio.sleep(0.05)
    assert await actor.abort(["a", "b"]) == ["a"]
    (one,), (other,) = await batch
    assert (one.finish_reason["type"], other.finish_reason["type"]) == ("abort", "length")


async def test_each_sample_draws_with_its_own_seed():
    class Seeds(StandInEngine):
        async def async_generate(self, sampling_params, **rest):
            return answer([sampling_params.get("sampling_seed", -1)], {"type": "length"})

    actor = RolloutActor("unused", engine_factory=Seeds)
    batch = await actor.generate_batch([[1], [2]], n=2, sampling={"sampling_seed": 40})
    assert [sample.output_ids for samples in batch for sample in samples] == [[40], [41], [42], [43]]
    ((sample,),) = await actor.generate_batch([[1]])
    assert sample.output_ids == [-1]


async def test_steps_book_weight_updates_and_versions(actor, tmp_path):
    async def update(named_tensors, flush_cache):
        return SimpleNamespace(seconds=0.5, tensors=1)

    actor._keeper.engine.async_update_weights = update
    await actor.begin_step(3, requests=1)
    await actor.update_weights([])
    await actor.update_weights([])
    ((sample,),) = await actor.generate_batch([[1]], sampling={"max_new_tokens": 2})
    assert (sample.weight_version_begin, sample.weight_version_end) == (2, 2)
    report = await actor.end_step()
    await actor.begin_step(4)
    assert actor.progress() == {"total": 0, "done": 0, "inflight": 0}
    assert ((await actor.end_step()).weight_update_s, report.weight_update_s) == (0, 1)
    assert (report.step, report.responses, report.longest_response) == (3, 1, 2)
    actor.shutdown()
    assert read_json_lines(tmp_path / "steps.jsonl", StepReport) == actor.report()


async def test_arguments_that_do_not_fit_are_refused(actor):
    for arguments, message in (
        ({"n": 0}, "n must be at least 1 and timeout_s above 0, got n=0"),
        ({"sampling": {"n": 2}}, "sampling must not hold 'n'"),
        ({"sampling": [{}]}, "sampling has 1 entries for 2 samples"),
        ({"request_ids": ["a"]}, "request_ids has 1 entries for 2 samples"),
    ):
        with pytest.raises(ValueError, match=message):
            await actor.generate_batch([[1], [2]], **arguments)
    assert await actor.generate_batch([]) == []
    with pytest.raises(TypeError, match="treshold"):
        RolloutActor("unused", switch={"treshold": 4}, engine_factory=StandInEngine)


# ---- the command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--ranks", "3"], "ranks must be 2 or 4: the demo's model has 8 experts and 4 heads; got 3"),
        (["demo", "--problems", "65"], "problems must be between 1 and the sample's 64, got 65"),
        (["demo", "--problems", "3"], "must be at least 16 requests"),
        (["demo", "--out", __file__], "out must be a folder"),
        (["verify", "--switches", "0"], "switches must be at least 1, got 0"),
        (["verify", "--dtype", "float8"], "dtype='float8' is unknown; use one of ['float32', 'bfloat16']"),
        (["verify", "--ranks", "1"], "ranks must be at least 2, got 1"),
    ],
)
def test_bad_arguments_exit_2_with_one_line(arguments, message):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: ") and message in line


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_verify_ends_with_its_json_and_code(monkeypatch, ok, code):
    calls = []

    def run(**arguments):
        calls.append(arguments)
        return {"switches": 4, "ok": ok}

    monkeypatch.setitem(sys.modules, "rollout.verify", SimpleNamespace(run=run))
    result = CliRunner().invoke(app, ["verify", "--switches", "4", "--ranks", "2"])
    asked = {"switches": 4, "ranks": 2, "dtype": "float32", "share_gpu": False, "model": None}
    assert (result.exit_code, calls) == (code, [asked])
    assert json.loads(result.stdout.splitlines()[-1]) == {"switches": 4, "ok": ok}


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from typer.testing import CliRunner; from rollout.cli import app; "
        "assert CliRunner().invoke(app, ['demo', '--help']).exit_code == 0; "
        "print([name for name in ('torch', 'sglang', 'ray', 'transformers', 'datasets') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
