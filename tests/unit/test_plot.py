from matplotlib.image import imread

from moebius_engine.telemetry import StepReport, StepTrace, SwitchRecord, TraceSample
from rollout.phases import step_report
from rollout.plot import _stairs, save_png, terminal_plot

LENGTHS = [1, 1, 2, 2, 3, 4, 6, 9]


def report(switched: bool) -> StepReport:
    samples = [
        TraceSample(t_s=t, inflight=sum(n > t for n in LENGTHS), tokens=sum(min(n, t) for n in LENGTHS), layout="ep")
        for t in range(10)
    ]
    switch = SwitchRecord(
        source="ep", target="tp", reason="policy", step=0, forward_ct=4, started_at_s=4.0, running=2, waiting=0,
        prefilling=0, kv_tokens=10, decide_ms=1, metadata_ms=2, kv_ms=3, weights_ms=4, rest_ms=5, total_ms=15,
        kv_bytes=1, weight_bytes=1,
    )  # fmt: skip
    refused = switch.model_copy(update={"refused": "too full", "started_at_s": 3.0})
    trace = StepTrace(step=0, samples=samples, switches=(refused, switch) if switched else ())
    return step_report(trace, LENGTHS, threshold=3)


REPORTS = {"tp": report(False), "ep": report(False), "switching": report(True)}


def test_png_is_a_picture(tmp_path):
    path = tmp_path / "new" / "inflight.png"
    save_png(REPORTS, path, "eight requests")
    picture = imread(path)
    assert picture.shape[0] > 400 and picture.shape[1] > 800
    assert picture[..., :3].std() > 0.01  # not blank


def test_terminal_plot_marks_the_switch_once_and_names_every_run():
    text = terminal_plot(REPORTS, width=80, height=20, colour=False)
    assert "\x1b" not in text
    assert len(text.splitlines()) <= 21
    assert text.count("ep→tp in 15 ms") == 1
    for name in REPORTS:
        assert f"{name}: 9.0 s" in text
    assert "T_h = 3 requests" in text
    assert "\x1b" in terminal_plot(REPORTS)


def test_plots_do_not_pile_up():
    assert terminal_plot(REPORTS, colour=False) == terminal_plot(REPORTS, colour=False)


def test_stairs_hold_each_count_until_the_next():
    assert _stairs(report(False).model_copy(update={"inflight": ((0.0, 4), (1.0, 2), (3.0, 0))})) == (
        [0.0, 1.0, 1.0, 3.0, 3.0],
        [4, 4, 2, 2, 0],
    )
