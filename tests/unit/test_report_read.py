"""Reading runs: JSON lines of synthetic traces, and real wandb offline runs."""

import json
from pathlib import Path

import pytest

from moebius_engine.telemetry import UpdateRecord
from rollout.metrics import scalars
from rollout.report.sources import read_runs
from rollout.report.wandb_run import read_run
from rollout.verl_plugin.metrics import merge
from tests.unit.report_cases import synthetic, three_runs, verl_config, wandb_run, write_lines

UPDATE = UpdateRecord(seconds=0.5, bytes=8, tensors=1, layout="ep")


@pytest.fixture(scope="module")
def of_verl(tmp_path_factory):
    """A run such as verl logs it: a validation line, a step, and a step of two replicas, with their plots."""
    reports = {
        1: [synthetic("switching", 1, 2, 2)],
        2: [synthetic("switching", 2, *times) for times in ((2, 5), (4, 1))],
    }
    one = merge([(reports[1], [UPDATE])])
    two = merge([([report], []) for report in reports[2]])
    lines = [(0, {"val/reward": 0.25} | merge([([], [UPDATE])]))]
    lines += [(step, {"training/global_step": step, "timing_s/gen": 9.5} | line) for step, line in ((1, one), (2, two))]
    config = verl_config(policy="rollout", threshold=4, ranks=2, dump_dir="/data/requests")
    folder = wandb_run(tmp_path_factory.mktemp("verl") / "a", config, lines, curves=reports)
    (run,) = read_runs([str(folder)])
    return folder, run


@pytest.fixture(scope="module")
def of_sink(tmp_path_factory):
    """A run such as WandbSink logs it, of two steps in static TP."""
    lines = [(step, scalars(synthetic("tp", step, 3, 2))) for step in (1, 2)]
    (run,) = read_runs([f"base={wandb_run(tmp_path_factory.mktemp('sink') / 'a', {}, lines)}"])
    return run


def test_verls_step_lines(of_verl):
    _, run = of_verl
    assert (run.name, run.kind, run.why, list(run.steps)) == ("switching", "switching", "by its configuration", [1, 2])
    step = run.steps[1]
    assert (step.step_s, step.burst_s, step.tail_s, step.tokens, step.threshold) == (4, 2, 2, 100, 4)
    (cost,) = step.costs
    assert (cost.direction, cost.switches) == (None, 1)
    assert cost.phase_ms == {"decide": 1, "metadata": 2, "kv": 3, "weights": 4, "rest": 5}
    assert not run.has_curves and run.notes == ()


def test_of_two_replicas_the_slowest_gives_the_times_and_both_the_switches(of_verl):
    step = of_verl[1].steps[2]
    assert (step.step_s, step.burst_s, step.tail_s) == (7, 2, 5)
    assert step.tokens == 200
    (cost,) = step.costs
    assert (cost.switches, cost.phase_ms["weights"]) == (2, 8)


def test_a_wandb_run_of_the_actor_is_what_it_did(of_sink):
    run = of_sink
    assert (run.name, run.kind, run.why) == ("base", "tp", "since it stayed in TP")
    assert [step.step_s for step in run.steps.values()] == [5, 5]
    assert run.steps[1].threshold == 4


def test_both_formats_say_the_same(of_sink, tmp_path):
    path = write_lines(tmp_path, [synthetic("tp", step, 3, 2) for step in (1, 2)])
    (lines,) = read_runs([str(path)])
    for field in ("number", "step_s", "burst_s", "tail_s", "tokens", "threshold", "layout_at_end", "switched", "costs"):
        assert [getattr(step, field) for step in lines.steps.values()] == [
            getattr(step, field) for step in of_sink.steps.values()
        ], field


def test_what_wandbs_reader_remarks_is_kept(of_verl, tmp_path):
    (whole,) = of_verl[0].glob("*.wandb")
    cut = tmp_path / "run-cut.wandb"
    cut.write_bytes(whole.read_bytes()[:-100])
    steps, kind, remarks = read_run(cut)
    assert (len(steps), kind) == (1, "switching")
    assert len(remarks) == 1 and "incomplete" in remarks[0]


def test_a_file_that_is_no_wandb_run(tmp_path):
    (tmp_path / "run-x.wandb").write_bytes(b"nothing of wandb's")
    with pytest.raises(ValueError, match=r"run-x\.wandb: wandb cannot read it: .*header"):
        read_runs([str(tmp_path)])


def test_an_empty_wandb_run(tmp_path):
    (tmp_path / "run-x.wandb").write_bytes(b"")
    with pytest.raises(ValueError, match="is an empty run"):
        read_runs([str(tmp_path)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moebius/step_time": 1.0}, r"record \d+: unknown metrics \['moebius/step_time'\]"),
        ({"moebius/replica_0/new": 1.0}, r"record \d+: unknown metrics \['moebius/new'\]"),
        ({"moebius/tail_s": "NaN"}, r"record \d+: moebius/tail_s should be a number, and is 'NaN'"),
    ],
)
def test_a_metric_that_is_not_known(monkeypatch, change, message):
    line = {"_step": 1} | merge([([synthetic("tp", 1, 1, 1)], [])] * 2) | change
    records = [{"num": 9, "type": "history", "history": {"item": line}}]
    monkeypatch.setattr("rollout.report.wandb_run._records", lambda path: (records, []))
    with pytest.raises(ValueError, match=message):
        read_run(Path("x.wandb"))


@pytest.mark.parametrize("kind", ["tp", "ep"])
def test_verls_configuration_says_which_layout_is_kept(monkeypatch, kind):
    update = verl_config(policy=kind, ranks=2)
    monkeypatch.setattr("rollout.report.wandb_run._records", lambda path: ([run_record(update)], []))
    assert read_run(Path("x.wandb")) == ([], kind, [])


def test_a_configuration_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr("rollout.report.wandb_run._records", lambda path: ([run_record(verl_config(band=3))], []))
    with pytest.raises(ValueError, match=r"x\.wandb: its engine_kwargs\.moebius is not of this version: .*band"):
        read_run(Path("x.wandb"))


def run_record(config):
    return {"num": 2, "type": "run", "run": {"config": {"update": config}}}


def test_the_demos_folder_is_three_runs(tmp_path):
    runs = read_runs([str(three_runs(tmp_path))])
    assert [(run.name, run.kind, len(run.steps)) for run in runs] == [
        ("tp", "tp", 2),
        ("ep", "ep", 2),
        ("switching", "switching", 2),
    ]
    step = runs[2].steps[1]
    assert step.inflight == ((0, 8), (1, 6), (2, 3), (4, 0))
    (mark,) = step.marks
    assert (mark.t_s, mark.inflight, mark.direction, mark.ms) == (2, 3, "ep→tp", 15)


def test_names_and_paths(tmp_path):
    folder = three_runs(tmp_path / "lr=1")  # a path with = in it that exists is a path
    paths = [str(folder / "tp"), f"mine={folder / 'switching' / 'steps.jsonl'}"]
    assert [run.name for run in read_runs(paths)] == ["tp", "mine"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}/nowhere"], "nowhere does not exist"),
        (["a={}/nowhere"], "nowhere does not exist"),
        (["={}"], "should be PATH or NAME=PATH"),
        (["{}/tp/other.txt"], "other.txt is no run"),
        (["{}/bare"], "bare is no run: no steps.jsonl, no wandb run"),
        (["{}/empty"], "is an empty run"),
        (["a={}"], "has .* runs, so it cannot be named a"),
        (["{}/tp", "{}/tp/steps.jsonl"], "are both named tp; name them: NAME=PATH"),
        (["a={}/tp", "b={}/tp"], "are both static TP: a comparison has one of each"),
        (["{}/switching", "{}/switching"], "are both named switching; name them"),
        ([f"{name}={{}}/switching" for name in "abcde"], "5 switching runs were given, and a page shows at most 4"),
        (["{}/two"], "two has 2 runs: .*; name one file"),
    ],
)
def test_what_is_refused(tmp_path, arguments, message):
    three_runs(tmp_path)
    (tmp_path / "tp" / "other.txt").write_text("{}")
    (tmp_path / "bare").mkdir()
    write_lines(tmp_path / "empty", [])
    write_lines(tmp_path / "two", [])
    (tmp_path / "two" / "run-a.wandb").touch()
    if arguments == ["a={}"]:
        (tmp_path / "two" / "run-a.wandb").unlink()
    with pytest.raises(ValueError, match=message):
        read_runs([argument.format(tmp_path) for argument in arguments])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": 3}, "speed: Extra inputs are not permitted"),
        ({"step_s": "fast"}, "step_s: Input should be a valid number"),
        ({"tail_s": None, "a": 1, "b": 1, "c": 1, "d": 1}, "tail_s: .*; a: .*; b: .*; and 2 more$"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, change, message):
    path = write_lines(tmp_path, [synthetic("tp", 1, 1, 1)])
    good = path.read_text()
    path.write_text(good + json.dumps(json.loads(good) | change) + "\n")
    with pytest.raises(ValueError, match=rf"steps\.jsonl, line 2, is not a StepReport: {message}"):
        read_runs([str(path)])
