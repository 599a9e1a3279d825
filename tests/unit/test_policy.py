"""The policies: what they ask for, and what they never do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moebius_engine.config import SwitchConfig
from moebius_engine.layout import Layout
from moebius_engine.switch.policy import Policy

EP, TP = Layout.EP, Layout.TP


class Engine:
    """As much of a scheduler as a policy sees: it switches when asked, one second a step."""

    def __init__(self, layout: Layout = EP, **settings):
        self.policy, self.layout, self.now = Policy(SwitchConfig(**settings)), layout, 0.0

    def run(self, *counts: int) -> list[tuple[int, Layout]]:
        """(in-flight count, layout asked for) of every switch while these counts are seen."""
        asked = []
        for count in counts:
            self.now += 1.0
            target = self.policy.observe(self.now, count, self.layout)
            if target is not None:
                asked.append((count, target))
                self.go(target)
        return asked

    def begin(self, requests: int | None = None) -> Layout | None:
        target = self.policy.begin_step(requests)
        if target not in (None, self.layout):
            self.go(target)
        return target

    def go(self, target: Layout) -> None:
        assert target != self.layout
        self.layout = target
        self.policy.switched(self.now)


def test_rollout_goes_to_tp_once_when_the_burst_has_shrunk():
    engine = Engine(threshold=10)
    assert engine.begin(20) == EP
    assert engine.run(3, 12, 20, 10, 9, 4, 1) == [(9, TP)]


def test_rollout_does_not_take_the_submission_of_a_burst_for_its_tail():
    engine = Engine(threshold=10)
    assert engine.run(1, 4, 8, 9) == []


def test_rollout_stays_in_tp_until_the_next_step():
    engine = Engine(threshold=10)
    engine.run(20, 9)
    assert engine.layout == TP
    assert engine.run(15, 30, 2) == []
    assert engine.begin() == EP


def test_rollout_begins_a_small_announced_step_in_tp():
    engine = Engine(threshold=10)
    assert engine.begin(9) == TP
    assert engine.run(0, 0, 5, 9, 1) == []


def test_rollout_leaves_tp_if_the_announcement_was_too_small():
    engine = Engine(threshold=10)
    engine.begin(9)
    assert engine.run(0, 5, 12, 11, 9, 12) == [(12, EP), (9, TP)]


def test_rollout_keeps_an_announcement_while_nothing_has_arrived():
    """If the step could not begin in TP, its first request leads there."""
    engine = Engine(threshold=10)
    engine.policy.begin_step(9)
    assert engine.run(0, 0, 5) == [(5, TP)]


@pytest.mark.parametrize("layout", [EP, TP])
def test_rollout_without_begin_step_ends_a_step_at_zero(layout):
    engine = Engine(threshold=10)
    engine.run(20, *([9] if layout == TP else []), 0)
    assert engine.layout == layout
    # The next burst is being submitted: 1, 5 are not its tail.
    assert engine.run(1, 5) == []
    assert engine.run(25, 9) == ([(25, EP), (9, TP)] if layout == TP else [(9, TP)])


def test_rollout_averages_over_a_given_window():
    engine = Engine(threshold=10, window=3)
    assert engine.run(20, 8, 8, 8) == [(8, TP)]
    engine = Engine(threshold=10, window=3)
    assert engine.run(12, 12, 9) == []


def test_rollout_asks_for_ep_again_after_a_cooldown():
    """The cooldown delays the way back into a new burst, it does not cancel it."""
    engine = Engine(threshold=10, cooldown_s=4.0)
    engine.run(20, 19, 18, 17, 9, 0)
    assert engine.layout == TP
    assert engine.run(20, 20, 20, 20) == [(20, EP)]


def test_interactive_passes_the_band_both_ways():
    engine = Engine(policy="interactive", threshold=10, window=2, cooldown_s=0.0)
    assert engine.run(12, 9, 8, 8, 7, 7) == [(7, TP)]
    assert engine.run(8, 10, 11) == [(11, EP)]


def test_interactive_does_not_leave_ep_at_the_moment_a_burst_arrives():
    engine = Engine(policy="interactive", threshold=10, window=4, cooldown_s=0.0)
    assert engine.run(9, 9, 9, 1, 1, 1, 30) == [(1, TP), (30, EP)]
    quiet = Engine(policy="interactive", threshold=10, window=4, cooldown_s=100.0)
    quiet.run(1, 1, 1)
    assert quiet.run(11) == []  # the mean of 1, 1, 1, 11 is low


@pytest.mark.parametrize("policy", ["ep", "tp", "off"])
def test_pinned_policies_never_ask(policy):
    for layout in Layout:
        assert Engine(layout, policy=policy, threshold=10).run(0, 500, 9, 1, 0, 500) == []


def test_a_step_of_a_pinned_policy_begins_in_its_layout():
    """A weight update between steps goes to EP."""
    assert Engine(policy="tp").begin() == TP
    assert Engine(policy="ep", layout=TP).begin() == EP
    assert Engine(policy="interactive").begin() is None


def test_a_refused_switch_is_not_asked_for_at_once():
    policy = Policy(SwitchConfig(threshold=10))
    policy.observe(0.0, 20, EP)
    assert policy.observe(1.0, 9, EP) == TP
    policy.refused(1.0)
    assert policy.observe(9.0, 9, EP) is None  # the same count, however long
    assert policy.observe(1.5, 8, EP) is None  # another count, too soon
    assert policy.observe(2.0, 8, EP) == TP


def test_asking_is_repeated_until_the_switch_has_happened():
    """The decision takes a step to reach all ranks, and one that is lost must come again."""
    policy = Policy(SwitchConfig(threshold=10))
    policy.observe(0.0, 20, EP)
    assert [policy.observe(1.0 + i, 9, EP) for i in range(3)] == [TP] * 3
    policy.switched(4.0)
    policy.observe(5.0, 0, TP)
    assert [policy.observe(6.0 + i, 20, TP) for i in range(3)] == [EP] * 3


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 30), st.integers(1, 4))
def test_rollout_switches_at_most_once_a_step(counts, threshold, window):
    engine = Engine(threshold=threshold, window=window)
    engine.begin(max(counts, default=threshold) + threshold)
    assert [target for _, target in engine.run(*counts)] in ([], [TP])


@given(st.lists(st.integers(0, 40), max_size=80), st.integers(1, 30), st.integers(1, 6))
def test_interactive_alternates_and_obeys_the_band(counts, threshold, window):
    engine = Engine(policy="interactive", threshold=threshold, window=window, cooldown_s=0.0)
    asked = engine.run(*counts)
    assert [target for _, target in asked] == [TP, EP] * (len(asked) // 2) + [TP] * (len(asked) % 2)
    assert all(count > threshold for count, target in asked if target == EP)
    assert all(0 < count <= threshold for count, target in asked if target == TP)


class PolicyMachine(RuleBasedStateMachine):
    """Any order of counts, steps, refusals, explicit switches and lost decisions."""

    @initialize(
        policy=st.sampled_from(["rollout", "interactive"]),
        threshold=st.integers(1, 12),
        window=st.integers(1, 3),
        cooldown=st.sampled_from([0.0, 0.5, 3.0]),
    )
    def start(self, policy, threshold, window, cooldown):
        self.config = SwitchConfig(policy=policy, threshold=threshold, window=window, cooldown_s=cooldown)
        self.policy, self.layout, self.now = Policy(self.config), EP, 0.0
        self.switched_at = self.refused = None
        self.went_down = False  # the policy has gone to TP in this step
        self.asked = None  # (count, target) of the last observation

    @rule(count=st.integers(0, 16), seconds=st.sampled_from([0.0, 0.1, 1.0, 4.0]), fate=st.sampled_from("sssrl"))
    def observe(self, count, seconds, fate):
        """fate: the switch asked for succeeds, is refused, or the decision is lost."""
        self.now += seconds
        if count == 0:
            self.went_down = False
        target = self.policy.observe(self.now, count, self.layout)
        self.asked = (count, target)
        if target is None:
            return
        assert target != self.layout
        if self.switched_at is not None:
            assert self.now - self.switched_at >= self.config.rest_s
        if self.refused is not None:
            assert count != self.refused[1] and self.now - self.refused[0] >= 1.0
        if self.config.policy == "rollout":
            assert not self.went_down
        if fate == "s":
            self.switch(target)
            self.went_down = target == TP
        elif fate == "r":
            self.policy.refused(self.now)
            self.refused = (self.now, count)

    @precondition(lambda self: self.config.policy == "rollout")
    @rule(requests=st.none() | st.integers(0, 30))
    def begin_step(self, requests):
        self.went_down = False
        self.asked = None
        target = self.policy.begin_step(requests)
        assert target == (TP if requests is not None and requests < self.config.low else EP)
        if target != self.layout:
            self.switch(target)

    def switch(self, target):
        self.layout, self.switched_at, self.refused = target, self.now, None
        self.policy.switched(self.now)

    @invariant()
    def nothing_is_asked_for_with_nothing_in_flight(self):
        asked = getattr(self, "asked", None)
        assert asked is None or asked[0] > 0 or asked[1] is None


PolicyMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
test_policy_machine = PolicyMachine.TestCase
