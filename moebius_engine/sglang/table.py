"""The table of hooks that switching needs in a scheduler process (the CPU platform's own are in cpu/table.py)."""

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.server_args import ServerArgs

from moebius_engine.config import SwitchConfig
from moebius_engine.sglang.building import BUILDING_HOOKS
from moebius_engine.sglang.commands import answer_static
from moebius_engine.sglang.expert_tiles import TILE_HOOKS
from moebius_engine.sglang.hooks import Hook
from moebius_engine.sglang.penalties import PENALTY_HOOKS
from moebius_engine.sglang.priorities import PRIORITY_HOOKS
from moebius_engine.sglang.scheduler import SwitchingScheduler


def switching_hooks(tp_server_args: ServerArgs, config: SwitchConfig) -> tuple[Hook, ...]:
    """All hooks of a switching scheduler process; the settings travel on the scheduler class."""
    scheduler = type("SwitchingScheduler", (SwitchingScheduler,), {"tp_server_args": tp_server_args, "config": config})
    return (
        Hook(
            "sglang.srt.managers.scheduler.Scheduler",
            HookType.REPLACE,
            scheduler,
            (),
            "a subclass holds both layouts and switches between them",
        ),
        *BUILDING_HOOKS,
        *PENALTY_HOOKS,
        *PRIORITY_HOOKS,
        *TILE_HOOKS,
    )


STATIC_HOOKS = (
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        HookType.AROUND,
        answer_static,
        ("self", "recv_req"),
        "a stock engine with switching off shows its weights' digests, for comparison",
    ),
)
