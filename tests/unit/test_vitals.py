"""When a rank counts as silent or stuck: a pure function of what it has shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.vitals import Activity, Judge, State, how_it_ended, make_vitals, state_of

SILENT_S, STUCK_S, POLL_S = 8.0, 20.0, 0.25


def judged(until_s, change, ranks=2, blind=()):
    """First finding and its time, looking every POLL_S but within `blind`; `change` sets the vitals for a time."""
    vitals, judge, now_s = make_vitals(ranks), Judge(ranks, SILENT_S, STUCK_S, 0.0), 0.0
    while now_s < until_s:
        now_s += POLL_S
        change(vitals, now_s)
        if not any(start <= now_s < end for start, end in blind) and (found := judge.look(vitals, now_s)):
            return now_s, found
    return None


def alive(vitals, now_s):
    for vital in vitals:
        vital.beat_s = now_s


def test_a_rank_that_stops_is_found_in_time_and_named():
    def stops(vitals, now_s):
        alive(vitals, now_s)
        vitals[1].pid, vitals[1].beat_s = 77, min(now_s, 5.0)

    found_s, findings = judged(60, stops)
    assert SILENT_S < found_s - 5 <= SILENT_S + POLL_S
    (finding,) = findings
    assert finding.startswith("rank 1 (pid 77) has shown no sign of life for 8.")


def test_a_rank_that_never_shows_a_sign_is_found():
    found_s, findings = judged(60, lambda vitals, now_s: None)
    assert found_s <= SILENT_S + POLL_S and len(findings) == 2


@given(st.floats(1, 1000))
def test_a_watcher_that_slept_itself_blames_nobody(slept_s):
    """As when the whole machine stands still: no beat is new when it looks again, but they come soon."""

    def stands_still(vitals, now_s):
        if not 10 <= now_s < 10 + slept_s + 1:
            alive(vitals, now_s)

    assert judged(slept_s + 30, stands_still, blind=[(10, 10 + slept_s)]) is None


def works(activity=Activity.SERVING, requests=3, stops_s=5.0):
    def change(vitals, now_s):
        alive(vitals, now_s)
        for vital in vitals:
            vital.activity, vital.requests, vital.forward_ct = activity, requests, int(min(now_s, stops_s) * 10)

    return change


def test_a_rank_without_progress_is_found_in_time():
    found_s, findings = judged(60, works())
    assert STUCK_S < found_s - 5 <= STUCK_S + 2 * POLL_S
    assert findings[0] == "rank 0 (pid 0) has taken no forward step for 20 s, with 3 requests in flight"


@pytest.mark.parametrize("reason", [Activity.SWITCHING, Activity.UPDATING, Activity.PAUSED, Activity.CLOSED])
def test_no_progress_is_due_in(reason):
    assert judged(100, works(activity=reason)) is None


def test_no_progress_is_due_without_requests_or_with_steps():
    assert judged(100, works(requests=0)) is None
    assert judged(100, works(stops_s=1000)) is None
    # A long prefill: one step, shorter than the limit, again and again.
    assert judged(200, lambda vitals, now_s: works(stops_s=now_s // 19 * 19)(vitals, now_s)) is None


def test_the_clock_of_progress_starts_after_a_switch():
    def switches_late(vitals, now_s):
        works(Activity.SWITCHING if now_s < 40 else Activity.SERVING)(vitals, now_s)

    found_s, _ = judged(100, switches_late)
    assert found_s - 40 == pytest.approx(STUCK_S, abs=2 * POLL_S)


def test_states():
    vitals = make_vitals(3)
    assert state_of(vitals) == State.READY
    for activity, state in [
        (Activity.PAUSED, State.READY),
        (Activity.CLOSED, State.DEGRADED),
        (Activity.UPDATING, State.UPDATING),
        (Activity.SWITCHING, State.SWITCHING),
    ]:
        vitals[1].activity = activity
        assert state_of(vitals) == state


def test_ends_in_words():
    assert how_it_ended(-9) == "was ended by SIGKILL (exit code -9)"
    assert how_it_ended(3) == "ended with exit code 3"
    assert how_it_ended(-200) == "was ended by signal 200 (exit code -200)"
