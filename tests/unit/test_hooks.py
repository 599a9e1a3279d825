"""Every hook fits the SGLang that is installed, and one that does not is refused by name."""

import importlib.util
from collections import defaultdict
from dataclasses import replace

import pytest
import sglang
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from moebius_engine.config import SwitchConfig
from moebius_engine.sglang.building import BUILDING_HOOKS
from moebius_engine.sglang.cpu.grammar import XGRAMMAR_HOOKS
from moebius_engine.sglang.cpu.table import CPU_HOOKS
from moebius_engine.sglang.dispatch import DISPATCH_HOOKS
from moebius_engine.sglang.expert_tiles import TILE_HOOKS
from moebius_engine.sglang.fp32 import FP32_HOOKS
from moebius_engine.sglang.hooks import Hook, HookError, check_applied, check_fits, register
from moebius_engine.sglang.penalties import PENALTY_HOOKS
from moebius_engine.sglang.priorities import PRIORITY_HOOKS
from moebius_engine.sglang.seeds import SEED_HOOKS
from moebius_engine.sglang.table import STATIC_HOOKS, switching_hooks

SWITCHING = (*BUILDING_HOOKS, *PENALTY_HOOKS, *PRIORITY_HOOKS, *TILE_HOOKS)
ALL = (*CPU_HOOKS, *SWITCHING, *DISPATCH_HOOKS, *STATIC_HOOKS, *FP32_HOOKS, *SEED_HOOKS)
if importlib.util.find_spec("tvm_ffi"):  # without it xgrammar cannot be imported
    ALL += XGRAMMAR_HOOKS
SOME = BUILDING_HOOKS[0]


@pytest.fixture
def registry(monkeypatch):
    """SGLang's registry without what this process has registered."""
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    return HookRegistry


@pytest.mark.parametrize("hook", ALL, ids=lambda hook: hook.target.removeprefix("sglang.srt."))
def test_every_hook_fits_the_installed_sglang(hook):
    check_fits(hook)
    assert hook.why and hook.why[0].islower() and not hook.why.endswith(".")


def test_a_target_is_hooked_once():
    targets = [hook.target for hook in (*ALL, *switching_hooks(None, SwitchConfig()))]  # type: ignore[arg-type]
    assert len(targets) == len(set(targets)) + len(SWITCHING)  # they are in the second


def test_an_unknown_parameter_list_is_refused():
    bad = replace(SOME, parameters=("self", "layer", "experts"))
    with pytest.raises(HookError, match=r"create_weights in SGLang .* takes \('self', 'layer', 'num_ex") as caught:
        check_fits(bad)
    assert_named(caught, bad)


@pytest.mark.parametrize(
    "target",
    [
        "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.make_weights",
        "sglang.srt.layers.quantization.unquant.FusedMoE.create_weights",
        "sglang.srt.layers.nowhere.UnquantizedFusedMoEMethod.create_weights",
    ],
)
def test_a_missing_target_is_refused(target):
    bad = replace(SOME, target=target)
    with pytest.raises(HookError, match="does not exist") as caught:
        check_fits(bad)
    assert_named(caught, bad)


def test_a_method_that_upstream_has_added_meanwhile_is_refused():
    bad = replace(SOME, adds=True)
    with pytest.raises(HookError, match="is now defined upstream") as caught:
        check_fits(bad)
    assert_named(caught, bad)


def test_a_hook_that_the_registry_did_not_apply_is_refused(registry):
    """The registry logs the failure and goes on; the check after it does not."""
    bad = Hook("sglang.srt.utils.common.no_such_function", HookType.AROUND, lambda original: original(), (), "a test")
    registry.register(bad.target, bad.function, bad.kind)
    registry.apply_hooks()
    with pytest.raises(HookError, match="was not patched by SGLang's HookRegistry") as caught:
        check_applied([bad])
    assert_named(caught, bad)


def test_nothing_is_registered_if_one_hook_does_not_fit(registry):
    with pytest.raises(HookError):
        register([SOME, replace(SOME, target="sglang.srt.nowhere.function")])
    assert not registry._hooks


def assert_named(caught, hook: Hook) -> None:
    """The message names the upstream function, the version that is installed, and why the hook exists."""
    message = str(caught.value)
    assert message.startswith(f"{hook.target} in SGLang {sglang.__version__} ") and hook.why in message
