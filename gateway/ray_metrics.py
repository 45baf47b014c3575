"""The samples of `/metrics` for Ray's metrics agent as well: who scrapes Ray's nodes has `ray_modelyard_…` among their series.

Nothing is counted a second time: what the registries hold is copied every EXPORT_S. Ray's gauges stand for all kinds of series,
since a copy of a counter or of a histogram's bucket is a value like any other; `rate` and `histogram_quantile` read them alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from prometheus_client.core import Metric
from ray.util.metrics import Gauge

log = logging.getLogger(__name__)

EXPORT_S = 10.0
_CREATED = "_created"

Labels = tuple[tuple[str, str], ...]


class RayMetrics:
    """One per replica. Series are bounded as those of the registries are (rule 16); one that is gone there goes to zero here,
    since Ray forgets none while the process lives."""

    def __init__(self) -> None:
        self._gauges: dict[tuple[str, tuple[str, ...]], Gauge] = {}
        self._shown: dict[Gauge, set[Labels]] = {}

    def export(self, metrics: Iterable[Metric]) -> None:
        shown: dict[Gauge, set[Labels]] = {}
        for metric in metrics:
            for sample in metric.samples:
                if sample.name.endswith(_CREATED):
                    continue
                gauge = self._gauge(sample.name, metric.documentation, sample.labels)
                gauge.set(float(sample.value), dict(sample.labels))
                shown.setdefault(gauge, set()).add(tuple(sample.labels.items()))
        for gauge, before in self._shown.items():
            for labels in before - shown.get(gauge, set()):
                gauge.set(0.0, dict(labels))
        self._shown = shown

    def _gauge(self, name: str, documentation: str, labels: Mapping[str, str]) -> Gauge:
        key = (name, tuple(labels))
        if key not in self._gauges:
            self._gauges[key] = Gauge(name, documentation, key[1])
        return self._gauges[key]

    async def run(self, metrics: Callable[[], Iterable[Metric]]) -> NoReturn:
        """That Ray takes none is no reason to answer no requests."""
        failed = False
        while True:
            try:
                self.export(metrics())
                failed = False
            except (ValueError, TypeError, RuntimeError) as error:
                if not failed:
                    log.warning("metrics do not reach Ray's agent, only /metrics has them: %s", error)
                failed = True
            await asyncio.sleep(EXPORT_S)
