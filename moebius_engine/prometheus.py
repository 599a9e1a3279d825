"""An engine's health as Prometheus metrics."""

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric, StateSetMetricFamily
from prometheus_client.registry import Collector

from moebius_engine.vitals import RankVitals, State


class HealthCollector(Collector):
    """state: of the engine, now. vitals: of its ranks, now. Both are asked for at every scrape."""

    def __init__(self, state: Callable[[], State], vitals: Callable[[], Sequence[RankVitals]]):
        self._state, self._vitals = state, vitals

    def collect(self) -> Iterator[Metric]:
        now = self._state()
        yield StateSetMetricFamily(
            "moebius_engine_state", "state of the engine", {state.value: state == now for state in State}
        )
        beats = GaugeMetricFamily(
            "moebius_rank_silence_seconds", "seconds since a rank's last sign of life", labels=["rank"]
        )
        for rank, vital in enumerate(self._vitals()):
            if vital.beat_s:
                beats.add_metric([str(rank)], time.monotonic() - vital.beat_s)
        yield beats
