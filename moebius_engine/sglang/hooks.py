"""Hooks into SGLang: one record a hook, checked against the SGLang that is installed.

SGLang's HookRegistry logs a hook that fails to apply and goes on, so an upstream rename would leave half a plug-in
running. Here a hook states the parameters that it relies on, they are compared with the upstream signature before
anything is patched, and after patching each target is looked up again.
"""

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sglang
from sglang.srt.plugins.hook_registry import HookRegistry, HookType


class HookError(RuntimeError):
    """An upstream function is not what a hook was written for."""


@dataclass(frozen=True)
class Hook:
    """One patch of an upstream function.

    target: dotted path of the upstream function or class.
    kind: how SGLang applies it (REPLACE, AROUND, ...).
    function: what is applied.
    parameters: upstream parameter names in order, as the hook relies on them; () for a class or an added method.
    why: one sentence.
    adds: True where the upstream class must inherit, not define, the method.
    """

    target: str
    kind: HookType
    function: Callable
    parameters: tuple[str, ...]
    why: str
    adds: bool = False


def _refuse(hook: Hook, reason: str) -> HookError:
    return HookError(
        f"{hook.target} in SGLang {sglang.__version__} {reason}; this hook was written for 0.5.12 ({hook.why})"
    )


def check_fits(hook: Hook) -> None:
    """Raise HookError if the upstream target is missing or takes other parameters than the hook relies on."""
    owner_path, name = hook.target.rsplit(".", 1)
    try:
        owner = pkgutil.resolve_name(owner_path)
        upstream = getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise _refuse(hook, f"does not exist ({error})") from error
    if hook.adds and name in vars(owner) and hook.target not in HookRegistry._patched:
        raise _refuse(hook, "is now defined upstream, so the hook is no longer needed")
    if not hook.parameters:
        return
    found = tuple(inspect.signature(inspect.unwrap(upstream)).parameters)
    if found[: len(hook.parameters)] != hook.parameters:
        raise _refuse(hook, f"takes {found}, expected {hook.parameters}")


def register(hooks: Sequence[Hook]) -> None:
    """Check every hook, then hand them to SGLang's registry, which applies them (see `apply`)."""
    for hook in hooks:
        check_fits(hook)
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, hook.kind)


def check_applied(hooks: Sequence[Hook]) -> None:
    """Raise HookError for a hook that SGLang's registry did not apply."""
    for hook in hooks:
        if hook.target not in HookRegistry._patched:
            raise _refuse(hook, "was not patched by SGLang's HookRegistry (its log has the cause)")


def apply(hooks: Sequence[Hook]) -> None:
    """Register, apply and check hooks in a process that has already loaded SGLang's plug-ins."""
    register(hooks)
    HookRegistry.apply_hooks()
    check_applied(hooks)
