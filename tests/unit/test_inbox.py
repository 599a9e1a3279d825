"""The exchange between ranks: when what was sent is handled, and that a switch voids a decision."""

import pytest
import torch.distributed as dist

from moebius_engine.layout import Layout
from moebius_engine.sglang.inbox import Header, Inbox


@pytest.fixture
def inbox(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Inbox(dist.group.WORLD)
    dist.destroy_process_group()


def header(work=0, control=0, inflight=0, decision=0) -> Header:
    return Header(work, control, inflight, 0, 0, decision, 0, 0)


def test_in_tp_what_is_sent_is_handled_in_the_next_step_requests_first(inbox):
    assert inbox.receive(Layout.TP) == []
    inbox.send(Layout.TP, ["a", "b"], ["flush"], header(work=2, control=1, inflight=3))
    assert inbox.receive(Layout.TP) == ["a", "b", "flush"]
    assert (inbox.inflight(), inbox.arriving()) == (3, 2)
    inbox.send(Layout.TP, [], [], header())
    assert inbox.receive(Layout.TP) == []


@pytest.mark.parametrize("now", Layout)
def test_in_ep_requests_are_handled_when_they_come_and_travel_nowhere(inbox, now):
    """Also if a switch follows before the exchange ends."""
    inbox.send(Layout.EP, ["a", "b"], ["flush"], header(work=2, control=1, inflight=5))
    assert inbox.receive(now) == ["flush"]
    assert (inbox.inflight(), inbox.arriving()) == (5, 0)


def test_requests_sent_in_tp_are_not_lost_if_the_exchange_ends_in_ep(inbox):
    inbox.send(Layout.TP, ["a"], [], header(work=1))
    assert inbox.receive(Layout.EP) == ["a"]


def test_a_switch_voids_the_decision_at_hand_and_the_one_under_way(inbox):
    inbox.send(Layout.EP, [], [], header(decision=2))
    inbox.receive(Layout.EP)
    inbox.send(Layout.EP, [], [], header(decision=2))
    assert inbox.headers[0].decision == 2
    inbox.forget_decision()
    assert inbox.headers[0].decision == 0
    inbox.receive(Layout.EP)
    assert inbox.headers[0].decision == 0
    inbox.send(Layout.EP, [], [], header(decision=1))
    inbox.receive(Layout.EP)
    assert inbox.headers[0].decision == 1  # one decided after the switch counts


def test_counts_are_read_in_the_layout_in_which_they_were_taken(inbox):
    """The plot of a step once dipped at the switch: EP's counts, one rank's each, were read as TP's."""
    inbox.send(Layout.EP, [], [], header(inflight=5))
    inbox.receive(Layout.TP)
    inbox.headers.append(header(inflight=7))  # the other rank's
    assert inbox.inflight() == 12
    inbox.send(Layout.TP, [], [], header(inflight=12))
    inbox.receive(Layout.TP)
    assert inbox.inflight() == 12
