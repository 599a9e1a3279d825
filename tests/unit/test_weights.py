"""What a full set of weights is, and when the weights may be used."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from safetensors import safe_open

from moebius_engine.layout.shape import ModelShape
from moebius_engine.weights.manifest import is_expert, qwen3_moe_manifest
from moebius_engine.weights.update import WeightSet, check_full

MANIFEST = {"a": (2, 3), "b": (4,), "c": (1, 1), "d": (5,)}
some_names = st.sets(st.sampled_from(sorted(MANIFEST)), min_size=1)


class WeightSetMachine(RuleBasedStateMachine):
    """Against a model that keeps the names which have not arrived since the update's first byte."""

    def __init__(self):
        super().__init__()
        self.weights = WeightSet(MANIFEST)
        self.missing: set[str] = set()
        self.version = 0

    @rule(names=some_names)
    def a_bucket_arrives(self, names):
        self.weights.check([(name, MANIFEST[name]) for name in names])
        self.weights.begin(names)
        assert not self.weights.complete
        if not names <= self.missing:  # a first bucket, or a sender that starts anew
            self.missing = set(MANIFEST)
        self.missing -= names
        self.version += not self.missing
        assert self.weights.arrived(names) == (not self.missing)

    @rule(names=some_names)
    def a_bucket_fails_in_the_middle(self, names):
        self.weights.begin(names)
        self.weights.invalidate()
        self.missing = set(MANIFEST)

    @rule(names=some_names, fault=st.sampled_from(["unknown", "misshapen", "twice"]))
    def a_bad_bucket_changes_nothing(self, names, fault):
        bucket = [(name, MANIFEST[name]) for name in names]
        name = bucket[0][0]
        bucket.append({"unknown": ("z", (1,)), "misshapen": (name, (9, 9)), "twice": bucket[0]}[fault])
        with pytest.raises(ValueError, match=("z" if fault == "unknown" else name) + ".*nothing was written"):
            self.weights.check(bucket)

    @rule()
    def the_full_set_heals(self):
        self.weights.begin(MANIFEST)
        assert self.weights.arrived(MANIFEST)
        self.missing, self.version = set(), self.version + 1

    @invariant()
    def state_and_reason_agree(self):
        assert self.weights.complete == (not self.missing)
        assert self.weights.version == self.version
        assert bool(self.weights.reason) == bool(self.missing)
        if self.missing:
            assert f"{len(self.missing)} of {len(MANIFEST)} tensors" in self.weights.reason
            assert min(self.missing) in self.weights.reason


WeightSetMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=20)
test_weight_set = WeightSetMachine.TestCase


FULL = list(MANIFEST.items())


def test_a_full_update_or_none_is_good():
    check_full(MANIFEST, FULL)
    check_full(MANIFEST, FULL[::-1])
    check_full(MANIFEST, [])


@pytest.mark.parametrize(
    ("update", "text"),
    [
        (FULL[:2], r"2 of 4 tensors are missing \(c, d\); nothing was written"),
        ([*FULL, ("e", (1,))], "unknown tensor 'e'"),
        ([*FULL[1:], ("a", (3, 2))], r"a has shape \(3, 2\), the model needs \(2, 3\)"),
        ([*FULL, FULL[0]], "a comes twice"),
    ],
)
def test_a_bad_full_update_is_named(update, text):
    with pytest.raises(ValueError, match=text):
        check_full(MANIFEST, update)


def test_the_manifest_is_that_of_a_real_checkpoint(tiny_moe):
    from transformers import AutoConfig

    manifest = qwen3_moe_manifest(ModelShape.from_hf_config(AutoConfig.from_pretrained(tiny_moe).to_dict()))
    with safe_open(f"{tiny_moe}/model.safetensors", framework="pt") as checkpoint:
        shapes = {name: tuple(checkpoint.get_slice(name).get_shape()) for name in checkpoint.keys()}  # noqa: SIM118
    assert manifest == shapes
    assert sum(map(is_expert, manifest)) == 4 * 8 * 3
