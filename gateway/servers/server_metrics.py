"""Servers that run elsewhere, as this gateway finds them, for Prometheus. Labels are the site's own models (rule 16)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.link.link_set import LinkSet


class ServerMetrics(Collector):
    def __init__(self, links: LinkSet) -> None:
        self._links = links

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("modelyard_server_up", "1 while a server that runs elsewhere can be asked.", labels=("model",))
        running = GaugeMetricFamily("modelyard_server_running", "Requests of this gateway in flight there.", labels=("model",))
        for record in self._links.servers():
            up.add_metric((record.model,), float(record.state == "ready"))
            running.add_metric((record.model,), record.running)
        yield from (up, running)
