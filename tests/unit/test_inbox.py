"""The step's exchange between ranks: what is sent in one step is handled in the next, and a switch voids a decision."""

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
    return Header(work, control, inflight, 0, 0, decision, 0)


@pytest.mark.parametrize("layout", Layout)
def test_what_is_sent_is_handled_in_the_next_step_requests_first(inbox, layout):
    assert inbox.receive(layout) == []
    inbox.send(layout, ["a", "b"], ["flush"], header(work=2, control=1, inflight=3))
    assert inbox.receive(layout) == ["a", "b", "flush"]
    assert inbox.inflight() == 3
    inbox.send(layout, [], [], header())
    assert inbox.receive(layout) == []


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
