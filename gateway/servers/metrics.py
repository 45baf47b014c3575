"""What the gateway counts. Labels are bounded (rule 16): a name that is no model or route counts as `other`."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.api.errors import YardError
from gateway.state.view import SiteView

OTHER = "other"
_WAIT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class GatewayMetrics:
    def __init__(self, view: SiteView) -> None:
        self._view = view
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "modelyard_requests", "Requests ended, by outcome.", ("surface", "route", "code"), registry=self.registry
        )
        self.in_flight = Gauge("modelyard_requests_in_flight", "Requests being answered.", ("surface",), registry=self.registry)
        self.prompt_tokens = Counter("modelyard_prompt_tokens", "Tokens of prompts.", ("model",), registry=self.registry)
        self.completion_tokens = Counter("modelyard_completion_tokens", "Tokens of answers.", ("model",), registry=self.registry)
        self.first_token = Histogram(
            "modelyard_first_text_seconds",
            "From a request's arrival to its first text.",
            ("route",),
            buckets=_WAIT_BUCKETS_S,
            registry=self.registry,
        )
        self.duration = Histogram(
            "modelyard_request_seconds",
            "From a request's arrival to its end.",
            ("route",),
            buckets=(*_WAIT_BUCKETS_S, 120, 300),
            registry=self.registry,
        )
        self.shadows = Counter(
            "modelyard_shadow_requests", "Copies for models on trial, by outcome.", ("model", "outcome"), registry=self.registry
        )
        self.queued = Gauge("modelyard_requests_queued", "Requests that wait for their turn here.", registry=self.registry)
        degraded = Gauge(
            "modelyard_degraded", "1 while the site's state cannot be read and the last is served.", registry=self.registry
        )
        degraded.set_function(lambda: float(view.degraded))
        revision = Gauge("modelyard_site_revision", "Newest revision of the site that is served from.", registry=self.registry)
        revision.set_function(lambda: float(view.revision))

    def route_label(self, name: str) -> str:
        route = self._view.resolve(name)
        return OTHER if route is None else route.name

    def model_label(self, model: str) -> str:
        return model if model in self._view.models else OTHER


class RequestMeter:
    """Measures one request; `end` is called exactly once."""

    __slots__ = ("_began", "_metrics", "_route", "_seen_text", "_surface")

    def __init__(self, metrics: GatewayMetrics, surface: str, name: str) -> None:
        self._metrics = metrics
        self._surface = surface
        self._route = metrics.route_label(name)
        self._began = time.monotonic()
        self._seen_text = False
        metrics.in_flight.labels(surface).inc()

    def text(self) -> None:
        if not self._seen_text:
            self._seen_text = True
            self._metrics.first_token.labels(self._route).observe(time.monotonic() - self._began)

    def end(self, model: str, prompt_tokens: int, completion_tokens: int, error: YardError | None) -> None:
        metrics = self._metrics
        metrics.in_flight.labels(self._surface).dec()
        metrics.requests.labels(self._surface, self._route, "ok" if error is None else error.code.value).inc()
        metrics.duration.labels(self._route).observe(time.monotonic() - self._began)
        if model:
            label = metrics.model_label(model)
            metrics.prompt_tokens.labels(label).inc(prompt_tokens)
            metrics.completion_tokens.labels(label).inc(completion_tokens)
