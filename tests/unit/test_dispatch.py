"""Which rank the controller sends a new request to."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.sglang.dispatch import Loads, handle_load_update_req, report_load, round_robin_scheduler


def send(loads: Loads, ranks: int) -> int:
    rank = loads.lightest([True] * ranks)
    loads.sent(rank)
    return rank


def test_among_equals_it_goes_round():
    loads = Loads(3)
    assert [send(loads, 3) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_longer_rank_gets_nothing_until_the_others_have_caught_up():
    loads = Loads(2)
    loads.reported(0, held=5, received=0)
    loads.reported(1, held=2, received=0)
    assert [send(loads, 2) for _ in range(5)] == [1, 1, 1, 0, 1]


def test_a_rank_that_is_down_gets_nothing():
    assert Loads(2).lightest([False, True]) == 1


@given(st.data(), st.integers(2, 4))
def test_requests_under_way_are_counted_once(data, ranks):
    """However late reports are: what was sent is under way, held, or finished."""
    loads, under_way, held, received = Loads(ranks), [0] * ranks, [0] * ranks, [0] * ranks
    for _ in range(data.draw(st.integers(1, 40))):
        rank = data.draw(st.integers(0, ranks - 1))
        match data.draw(st.sampled_from(["send", "receive", "finish", "report"])):
            case "send":
                lightest = min(loads.inflight(other) for other in range(ranks))
                chosen = send(loads, ranks)
                assert loads.inflight(chosen) == lightest + 1
                under_way[chosen] += 1
            case "receive":
                arrived = data.draw(st.integers(0, under_way[rank]))
                under_way[rank], held[rank] = under_way[rank] - arrived, held[rank] + arrived
                received[rank] += arrived
            case "finish":
                held[rank] -= data.draw(st.integers(0, held[rank]))
            case "report":
                loads.reported(rank, held[rank], received[rank])
                assert loads.inflight(rank) == held[rank] + under_way[rank]


def test_a_report_reaches_the_controller():
    sent: list[list[str]] = [[], []]
    controller = SimpleNamespace(
        workers=[SimpleNamespace(send_pyobj=sent[rank].append) for rank in range(2)],
        status=[True, True],
        maybe_external_dp_rank_routing=lambda req: req == "pinned",
    )
    stock, ours = SimpleNamespace(dp_rank=0), SimpleNamespace(dp_rank=0)
    report_load(ours, held=2, received=7)
    updates: list = []
    for load in (stock, ours):
        handle_load_update_req(lambda self, obj: updates.append(obj), controller, SimpleNamespace(loads=[load]))
    assert len(updates) == 2  # upstream's count goes on
    controller._moebius_loads._sent[0] = 7
    for number in range(4):
        round_robin_scheduler(None, controller, f"request {number}")
    assert [len(rank) for rank in sent] == [1, 3]
