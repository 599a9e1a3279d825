"""The switch protocol under every interleaving and fault: what goes wrong is known, and a broken protocol is found.

The model's assumptions about waits are held to real processes in test_protocol_waits.py.
"""

import inspect
import itertools
import logging
from pathlib import Path

import pytest
from sglang.srt.distributed.parallel_state import GroupCoordinator

from moebius_engine.layout import Layout
from moebius_engine.switch.coordinator import run_switch
from tests.unit.protocol_model import FAULTS, World
from tests.unit.protocol_search import search

TIMEOUT_S = World.timeout_s
IN_TIME = dict.fromkeys(("exchange", "agree", "sums", "digests", "transfer", "decode"), TIMEOUT_S)
# SGLang's CPU group has a deadline of its own, whatever dist_timeout is: why the ranks have another (worker.py).
SGLANGS_S = inspect.signature(GroupCoordinator.__init__).parameters["gloo_timeout"].default.total_seconds()


@pytest.fixture(autouse=True)
def quiet(caplog):
    """The coordinator logs each exception, and here there are thousands."""
    caplog.set_level(logging.CRITICAL, "moebius_engine.switch.coordinator")


SURROUNDINGS = [
    pytest.param(
        {"target": target, "direct": direct, "compared": compared},
        id=f"{target}-{'direct' if direct else 'collective'}{'-check_bytes' if compared else ''}",
    )
    for target, direct, compared in itertools.product(Layout, (False, True), (False, True))
]
SIZES = [
    pytest.param(2, 2, id="2 ranks, 2 faults"),
    pytest.param(3, 1, id="3 ranks, 1 fault"),
    pytest.param(3, 2, id="3 ranks, 2 faults", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("around", SURROUNDINGS)
@pytest.mark.parametrize(("ranks", "faults"), SIZES)
def test_ranks_end_together_whatever_fails(around, ranks, faults):
    """One layout with every byte in it and every place accounted for, or an error on all ranks that are left. Only
    bytes of layers that are not compared can be bad."""
    report = search(World(**around, ranks=ranks, faults=faults, waits_s=IN_TIME))
    assert set(report.problems) == (set() if around["compared"] else {"bad kv in use", "bad weights in use"})


def test_with_sglangs_own_group_four_waits_would_be_late():
    assert SGLANGS_S == 2 * 60 * 60
    hosts = ("exchange", "agree", "sums", "digests")
    waits = IN_TIME | dict.fromkeys(hosts, SGLANGS_S)
    found = search(World(Layout.TP, compared=True, faults=1, waits_s=waits)).problems
    assert set(found) == {f"{wait} waits for more than {TIMEOUT_S:g} s" for wait in hosts}


@pytest.mark.parametrize("direct", [False, True])
def test_a_switch_that_moves_no_weights_is_no_worse(direct):
    kinds = tuple(kind for kind in FAULTS if kind != "corrupt")
    world = World(Layout.EP, direct=direct, with_weights=False, faults=2, kinds=kinds, waits_s=IN_TIME)
    assert not search(world).problems


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("target", Layout)
def test_a_corrupted_layer_is_rolled_back_and_a_second_one_ends_the_engine(target, direct):
    world = World(target, direct=direct, compared=True, faults=2, kinds=("corrupt",), waits_s=IN_TIME)
    report = search(world)
    assert not report.problems
    assert report.ends[("corrupt", "move"),] == {"rolled back"}
    assert report.ends[("corrupt", "move"), ("corrupt", "roll back")] == {"ends"}


# ---- Controls: protocols that are broken on purpose


class Without:
    """Steps that leave some out."""

    def __init__(self, steps, *names: str):
        self._steps, self._names = steps, names

    def __getattr__(self, name: str):
        return (lambda: {}) if name in self._names else getattr(self._steps, name)


class ShareRefusesInsteadOfFailing(Without):
    """As an exception before the exchange would, if it were taken for a reason."""

    def __init__(self, steps):
        super().__init__(steps)
        self._error: str | None = None

    def share(self, target):
        try:
            self._steps.share(target)
        except Exception as error:
            self._error = str(error)

    def prepare(self):
        return self._error or self._steps.prepare()


def commit_without_agreement(steps, agree, target, **options):
    votes = itertools.count()
    return run_switch(steps, lambda reason: reason if next(votes) == 1 else agree(reason), target, **options)


def move_kv_without_agreement(steps, agree, target, **options):
    votes = itertools.count()
    return run_switch(steps, lambda reason: agree(reason) if next(votes) else reason, target, **options)


def go_on_after_ones_own_refusal(steps, agree, target, **options):
    def vote(reason):
        everyones = agree(reason)
        return None if reason else everyones

    return run_switch(steps, vote, target, **options)


def roll_back_alone_and_only_in_name(steps, agree, target, **options):
    votes = itertools.count()
    last = lambda reason: reason if next(votes) == 1 else agree(reason)  # noqa: E731
    return run_switch(Without(steps, "roll_back"), last, target, **options)


def leave_the_bytes_there(steps, agree, target, **options):
    return run_switch(Without(steps, "roll_back"), agree, target, **options)


def go_on_after_ones_own_failure_to_prepare(steps, agree, target, **options):
    votes = itertools.count()
    return run_switch(steps, lambda reason: agree(reason if next(votes) else None), target, **options)


def leave_the_places_taken(steps, agree, target, **options):
    return run_switch(Without(steps, "abandon"), agree, target, **options)


def do_not_wait_for_the_bytes(steps, agree, target, **options):
    return run_switch(Without(steps, "finish"), agree, target, **options)


def take_an_exception_for_a_refusal(steps, agree, target, **options):
    return run_switch(ShareRefusesInsteadOfFailing(steps), agree, target, **options)


@pytest.mark.parametrize(
    ("protocol", "kinds", "problem"),
    [
        (go_on_after_ones_own_failure_to_prepare, ("raise",), "the target was not made ready"),
        (commit_without_agreement, ("refuse",), "a refusal ends the engine"),
        (move_kv_without_agreement, ("refuse",), "a refusal ends the engine"),
        (go_on_after_ones_own_refusal, ("refuse",), "a refusal ends the engine"),
        (roll_back_alone_and_only_in_name, ("refuse",), "ranks in different layouts"),
        (leave_the_bytes_there, ("refuse",), "bytes of two layouts on a rank"),
        (leave_the_places_taken, ("refuse",), "places in the target are not free"),
        (do_not_wait_for_the_bytes, (), "bytes of two layouts on a rank"),
        (take_an_exception_for_a_refusal, ("raise",), "ranks are in different collectives"),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_broken_protocol_is_found(protocol, kinds, problem, ranks):
    world = World(Layout.TP, ranks=ranks, direct=True, faults=1, kinds=kinds, waits_s=IN_TIME, protocol=protocol)
    assert problem in search(world).problems


@pytest.mark.parametrize("missing", sorted(IN_TIME))
def test_a_wait_without_a_deadline_is_found(missing):
    """In each of them a stopped rank leaves the others waiting for ever."""
    waits = {wait: seconds for wait, seconds in IN_TIME.items() if wait != missing}
    assert "hang" in search(World(Layout.TP, compared=True, faults=1, kinds=("stop",), waits_s=waits)).problems


# ---- The document


def test_the_document_has_the_outcomes_that_the_search_finds():
    ends: dict[tuple[tuple[str, str], ...], set[str]] = {}
    for target, direct in itertools.product(Layout, (False, True)):
        world = World(target, direct=direct, compared=True, faults=2, waits_s=IN_TIME)
        for faults, found in search(world).ends.items():
            ends.setdefault(faults, set()).update(found)
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    (head,) = [row for row in rows if row[0] == "fault"]
    table = {row[0]: row[1:] for row in rows if row[0] in FAULTS}
    assert set(table) == set(FAULTS)
    for kind, cells in table.items():
        for phase, cell in zip(head[1:], cells, strict=True):
            before = (("refuse", "verify"),) if phase == "roll back" else ()
            assert set(cell.split(" or ")) - {""} == ends.get((*before, (kind, phase)), set()), (kind, phase)
