"""Priority scheduling: in TP all ranks must preempt, and queue again, in one order."""

from sglang.srt.plugins.hook_registry import HookType

from moebius_engine.sglang.hooks import Hook


def preempt_to_schedule(original, self, req, server_args) -> bool:
    preempted = original(self, req, server_args)
    # The list was extended from a set of objects, whose order differs from one process to the next.
    self.preempt_list.sort(key=lambda req: req.time_stats.wait_queue_entry_time)
    return preempted


PRIORITY_HOOKS = (
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.preempt_to_schedule",
        HookType.AROUND,
        preempt_to_schedule,
        ("self", "req", "server_args"),
        "preempted requests queue again in the order of a set, which would part the ranks of TP",
    ),
)
