"""SwitchConfig: defaults of the paper, and what is refused."""

import dataclasses

import pytest

from moebius_engine.config import _TYPES, SwitchConfig


@pytest.mark.parametrize(
    ("policy", "low", "counts", "rest_s"), [("rollout", 256, 1, 0.0), ("interactive", 204, 8, 5.0), ("ep", 256, 1, 0.0)]
)
def test_defaults_are_the_papers(policy, low, counts, rest_s):
    config = SwitchConfig(policy=policy)
    assert (config.high, config.low, config.counts, config.rest_s) == (256, low, counts, rest_s)


def test_given_values_win():
    config = SwitchConfig(policy="interactive", threshold=10, low_threshold=3, window=2, cooldown_s=0.0)
    assert (config.low, config.counts, config.rest_s) == (3, 2, 0.0)


def test_the_smallest_interactive_band_can_still_switch_back():
    assert SwitchConfig(policy="interactive", threshold=1).low == 1


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SwitchConfig().threshold = 3


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"policy": "auto"}, r"policy='auto' is unknown: use one of \['rollout', 'interactive', 'ep', 'tp', 'off'\]"),
        ({"transfer": "nccl"}, r"transfer='nccl' is unknown: use one of \['auto', 'direct', 'collective'\]"),
        ({"threshold": 0}, "threshold=0: at least 1"),
        ({"threshold": "256"}, "threshold='256': a whole number"),
        ({"threshold": 2.5}, "threshold=2.5: a whole number"),
        ({"window": True}, "window=True: a whole number"),
        ({"timeout_s": "300"}, "timeout_s='300': a number of seconds"),
        ({"timeout_s": None}, "timeout_s=None: a number of seconds"),
        ({"silent_s": True}, "silent_s=True: a number of seconds"),
        ({"stuck_s": "120"}, "stuck_s='120': a number of seconds"),
        ({"cooldown_s": "5"}, "cooldown_s='5': a number of seconds"),
        ({"seeded": "yes"}, "seeded='yes': True or False"),
        ({"payoff": "false"}, "payoff='false': True or False"),
        ({"share_gpu": 1}, "share_gpu=1: True or False"),
        ({"check_bytes": None}, "check_bytes=None: True or False"),
        ({"calibrate": "on"}, "calibrate='on' is unknown: use one of"),
        (
            {"policy": "interactive", "calibrate": "auto", "low_threshold": 9},
            "low_threshold=9 without threshold, which calibrate='auto' is to find",
        ),
        ({"payoff": True}, "payoff=True with policy='rollout' and calibrate='off': it belongs to the rollout policy"),
        ({"payoff": True, "policy": "interactive", "calibrate": "auto"}, "payoff=True with policy='interactive'"),
        ({"low_threshold": 200}, "low_threshold=200 with threshold=256: the rollout policy has one threshold"),
        ({"policy": "interactive", "low_threshold": 257}, "low_threshold=257 must lie between 1 and threshold=256"),
        ({"policy": "interactive", "low_threshold": 0}, "low_threshold=0 must lie between 1 and threshold=256"),
        ({"window": 0}, "window=0: at least 1"),
        ({"cooldown_s": -1.0}, "cooldown_s=-1.0: 0 seconds or more"),
        ({"cooldown_s": float("nan")}, "cooldown_s=nan"),
        ({"timeout_s": 0.0}, "timeout_s=0.0: more than 0"),
        ({"timeout_s": float("inf")}, "timeout_s=inf"),
    ],
)
def test_contradictions_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        SwitchConfig(**settings)


def test_every_field_has_a_check_of_its_type():
    typed = {name for names, _, _ in _TYPES for name in names}
    named = {"policy", "static_layout", "calibrate", "transfer"}  # one of a few words
    assert typed | named == {field.name for field in dataclasses.fields(SwitchConfig)}
