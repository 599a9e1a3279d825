"""Faults of a switch after which the engine goes on in the layout that it was in, with every request.

docs/protocol.md has all faults in all states.
"""

from dataclasses import replace

import pytest

from moebius_engine.config import SwitchConfig
from moebius_engine.switch.faults import Fault
from tests.engine.inflight import GREEDY, logprob_difference, prompts, switched_run

REQUEST = {"input_ids": prompts(8), "sampling_params": GREEDY, "return_logprob": True}
UNDONE = [
    # First, in an engine that has never switched: only what this switch has moved comes back.
    (Fault("corrupt", "move_weights", rank=1, layer=1), "rolled back: w13/w2 of layer 1 arrived with other bytes"),
    (Fault("refuse", "prepare", rank=1), "rolled back: rank 1: prepare was told to refuse"),
    (Fault("raise", "prepare"), "rolled back: rank 0: prepare failed: InjectedFault"),
    (Fault("no_memory", "prepare", rank=1), "rolled back: rank 1: prepare failed: MemoryError"),
    (Fault("refuse", "verify", rank=1), "rolled back: rank 1: verify was told to refuse"),
    (Fault("drop", "move_weights", rank=0, layer=2), "rolled back: w13/w2 of layer 2 arrived with other bytes"),
    (Fault("corrupt", "move_kv", rank=1, layer=2), "rolled back: k/v of layer 2 arrived with other bytes"),
    (Fault("drop", "move_kv", rank=0, layer=1), "rolled back: k/v of layer 1 arrived with other bytes"),
]


@pytest.fixture(scope="module")
def checking(tiny_moe):
    """An engine that compares every layer, and may be broken."""
    from moebius_engine.engine import SwitchingEngine

    switch = SwitchConfig(policy="ep", timeout_s=120, silent_s=60, check_bytes=True, inject_faults=True)
    engine = SwitchingEngine(tiny_moe, ranks=2, switch=switch, max_running_requests=32, max_total_tokens=4096)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def undisturbed(checking):
    return checking.generate(**REQUEST)


@pytest.mark.parametrize("source", ["ep", "tp"])
@pytest.mark.parametrize(("fault", "reason"), UNDONE, ids=lambda value: getattr(value, "kind", ""))
def test_a_fault_is_undone_and_the_next_switch_goes(checking, undisturbed, source, fault, reason):
    target = "tp" if source == "ep" else "ep"
    checking.switch(source)
    checking.flush_cache()
    checking.inject(fault)
    run = switched_run(checking, [target, target], **REQUEST)
    assert run.records[0].refused is not None and run.records[0].refused.startswith(reason)
    assert run.records[1].refused is None and run.records[1].source == source
    assert run.tokens == [answer["output_ids"] for answer in undisturbed]
    assert logprob_difference(run.answers, undisturbed) < 1e-4


WAITED_FOR = [
    Fault("slow", at, rank=number % 2, seconds=0.4)
    for number, at in enumerate(["settle", "move_weights", "share", "prepare", "move_kv", "finish", "verify", "commit"])
]


@pytest.mark.parametrize("fault", WAITED_FOR, ids=lambda fault: fault.at)
def test_a_slow_rank_is_waited_for(checking, undisturbed, fault):
    checking.switch("ep")
    checking.inject(fault)
    run = switched_run(checking, ["tp"], **REQUEST)
    assert run.records[0].refused is None
    assert run.tokens == [answer["output_ids"] for answer in undisturbed]


def test_a_fault_that_cannot_be_is_refused(checking, monkeypatch):
    with pytest.raises(ValueError, match="there are 2 ranks and 4 layers"):
        checking.inject(Fault("raise", "share", rank=2))
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="needs SwitchConfig"):
        patch.setattr(checking, "config", replace(checking.config, inject_faults=False))
        checking.inject(Fault("raise", "share"))
    with pytest.raises(ValueError, match="kind='melt' is unknown"):
        Fault("melt", "share")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only 'prepare' and 'verify' can refuse"):
        Fault("refuse", "share")
    with pytest.raises(ValueError, match="bytes arrive at"):
        Fault("drop", "verify")
