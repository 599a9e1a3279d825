"""What deaths of engines have cost, as Prometheus metrics."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout.recovery.journal import Journal
from rollout.recovery.losses import Losses


class LossCollector(Collector):
    def __init__(self, losses: Losses, journal: Journal):
        self._losses, self._journal = losses, journal

    def collect(self) -> Iterator[Metric]:
        losses = self._losses
        yield CounterMetricFamily("moebius_restarts", "engines started after a death", losses.restarts)
        yield CounterMetricFamily("moebius_resumed_requests", "responses that another engine ended", losses.resumed)
        yield CounterMetricFamily("moebius_lost_seconds", "from deaths to the next engine being ready", losses.lost_s)
        yield GaugeMetricFamily("moebius_requests_in_flight", "requests that clients wait for", len(self._journal))
