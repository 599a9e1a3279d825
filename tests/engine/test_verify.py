"""`moebius-rollout verify` on real engines, and the controls: a broken switch must not pass."""

import json

import pytest
from typer.testing import CliRunner

from rollout.cli import app
from tests.engine import faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # three engine starts each

KEYS = [
    "switches",
    "inflight_min",
    "requests",
    "tokens_compared",
    "bytes_compared",
    "undecided",
    "max_logprob_diff",
    "weights_checksum",
    "ok",
]


def verify(switches: int):
    """Exit code, the result, and what stood on standard error."""
    outcome = CliRunner().invoke(app, ["verify", "--switches", str(switches), "--ranks", "2"], catch_exceptions=False)
    (line,) = outcome.stdout.splitlines()
    return outcome.exit_code, json.loads(line), outcome.stderr


def test_an_honest_engine_passes():
    code, result, log = verify(switches=6)
    assert (code, result["ok"]) == (0, True), log
    assert list(result) == KEYS
    assert result["switches"] == 6
    assert result["inflight_min"] >= 1
    assert result["requests"] >= 8
    assert result["tokens_compared"] > 100
    assert result["bytes_compared"] > 1_000_000
    assert 0 <= result["max_logprob_diff"] < 1e-3
    assert set(result["weights_checksum"]) == {"tp", "ep"}


@pytest.mark.parametrize(
    ("fault", "committed", "reason"),
    [
        ("kv", 2, "rolled back, but rank 0: KV is not what it was before the switch"),
        ("weights", 6, "weights after switch 5 to tp, rank 0: model.layers.0.mlp.experts.w13_weight differs"),
    ],
)
def test_a_broken_switch_fails(monkeypatch, fault, committed, reason):
    from moebius_engine import engine as module

    class Broken(module.SwitchingEngine):
        switched = 0

        async def async_switch(self, layout):
            self.switched += 1
            if self.switched == 3:
                await self._command("break_next_switch", fault=fault)
            return await super().async_switch(layout)

    monkeypatch.setattr(module, "run_scheduler", faults.run_scheduler_with_faults)
    monkeypatch.setattr(module, "SwitchingEngine", Broken)
    code, result, log = verify(switches=6)
    assert (code, result["ok"], result["switches"]) == (1, False, committed)
    assert reason in log
