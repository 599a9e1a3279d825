"""Which durations count as a decode step."""

from moebius_engine.layout import Layout
from moebius_engine.switch.step_clock import StepClock


def test_turns_with_the_same_requests_are_one_step_apart():
    clock = StepClock()
    for now, layout, decoding in [
        (0.0, Layout.EP, 8),
        (1.0, Layout.EP, 8),
        (3.0, Layout.EP, 8),
        (9.0, Layout.EP, 7),  # a request ended: this turn's step had another size
        (10.0, Layout.EP, 7),
        (50.0, Layout.EP, 0),  # a prefill
        (60.0, Layout.EP, 7),
        (61.0, Layout.TP, 7),
        (61.5, Layout.TP, 7),
    ]:
        clock.turn(now, layout, decoding)
    assert clock.take() == [(Layout.EP, 8, [1.0, 2.0]), (Layout.EP, 7, [1.0]), (Layout.TP, 7, [0.5])]
    assert clock.take() == []


def test_an_interruption_is_no_step():
    clock = StepClock()
    clock.turn(0.0, Layout.EP, 8)
    clock.interrupted()
    clock.turn(5.0, Layout.EP, 8)
    clock.turn(6.0, Layout.EP, 8)
    assert clock.take() == [(Layout.EP, 8, [1.0])]


def test_only_the_latest_are_kept():
    clock = StepClock()
    for turn in range(1000):
        clock.turn(float(turn), Layout.TP, 3)
    ((_, _, steps),) = clock.take()
    assert len(steps) == 64
