"""One engine for most tests of this folder: starting one takes the better part of a minute on two cores."""

import pytest

from moebius_engine.config import SwitchConfig


@pytest.fixture(scope="session")
def switching_engine(tiny_moe):
    """Two ranks, pinned to EP so that tests switch by hand; small limits, so that queues and chunks occur."""
    from moebius_engine import engine as module
    from tests.engine import faults

    original = module.run_scheduler
    module.run_scheduler = faults.run_scheduler_with_faults
    try:
        engine = module.SwitchingEngine(
            tiny_moe,
            ranks=2,
            switch=SwitchConfig(policy="ep", timeout_s=120),
            max_running_requests=32,
            chunked_prefill_size=128,
            max_total_tokens=4096,
            context_length=2048,
        )
    finally:
        module.run_scheduler = original
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(switching_engine):
    """The shared engine, idle and in EP with an empty cache."""
    switching_engine.switch("ep")
    switching_engine.flush_cache()
    return switching_engine
