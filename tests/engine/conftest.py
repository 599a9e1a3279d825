"""One engine for most tests of this folder: starting one takes the better part of a minute on two cores.

Its ranks look for requests all the time, which takes a core: tests that have engines of their own come before,
and it ends with the folder.

Engines of tests are given a minute to show a sign of life: where other things run too, a rank may get no core for long.
"""

from pathlib import Path

import pytest

from moebius_engine.config import SwitchConfig


def pytest_collection_modifyitems(items):
    here = [place for place, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    ordered = sorted((items[place] for place in here), key=lambda item: "switching_engine" in item.fixturenames)
    for place, item in zip(here, ordered, strict=True):
        items[place] = item


@pytest.fixture(scope="package")
def switching_engine(tiny_moe):
    """Two ranks, pinned to EP so that tests switch by hand; small limits, so that queues and chunks occur."""
    from moebius_engine.engine import SwitchingEngine
    from tests.engine.faults import faulty_schedulers

    with faulty_schedulers():
        engine = SwitchingEngine(
            tiny_moe,
            ranks=2,
            switch=SwitchConfig(policy="ep", timeout_s=120, silent_s=60, inject_faults=True),
            max_running_requests=32,
            chunked_prefill_size=128,
            max_total_tokens=4096,
            context_length=2048,
        )
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(switching_engine):
    """The shared engine, idle and in EP with an empty cache."""
    switching_engine.switch("ep")
    switching_engine.flush_cache()
    return switching_engine
