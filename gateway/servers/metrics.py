"""What the gateway counts. Labels are bounded (rule 16): a name that is no model or route counts as `other`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.api.buckets import Buckets
from gateway.api.errors import YardError
from gateway.servers.pool_metrics import PoolMetrics
from gateway.servers.tally import Tally
from gateway.state.snapshot import ObjectKey
from gateway.state.view import SiteView

OTHER = "other"
_WAIT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 1.5, 2.5, 5, 10, 30, 60)
_TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)


class GatewayMetrics:
    """`registry` is this gateway's own; `shared` is what all gateways of the site say alike. `exposition` is `/metrics`."""

    def __init__(self, view: SiteView) -> None:
        self._view = view
        self.registry = CollectorRegistry()
        self.shared = CollectorRegistry()
        self.route_switches = RouteSwitches(view)
        self.shared.register(PoolMetrics(view, self.route_switches.took))
        self.exposition: Callable[[], Awaitable[bytes]] = self._alone
        registry = self.registry
        self.requests = Counter(
            "modelyard_requests", "Requests ended, by outcome.", ("surface", "route", "code"), registry=registry
        )
        self.in_flight = Gauge("modelyard_requests_in_flight", "Requests being answered.", ("surface",), registry=registry)
        self.prompt_tokens = Counter("modelyard_prompt_tokens", "Tokens of prompts.", ("model",), registry=registry)
        self.cached_tokens = Counter(
            "modelyard_cached_tokens", "Of those, not computed: their KV was there.", ("model",), registry=registry
        )
        self.completion_tokens = Counter("modelyard_completion_tokens", "Tokens of answers.", ("model",), registry=registry)
        self.first_token = Histogram(
            "modelyard_first_token_seconds",
            "From a request's arrival to its first text.",
            ("route",),
            buckets=_WAIT_BUCKETS_S,
            registry=registry,
        )
        self.token = Histogram(
            "modelyard_token_seconds",
            "Between two tokens of one answer, on average over the answer.",
            ("route",),
            buckets=_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.duration = Histogram(
            "modelyard_request_seconds",
            "From a request's arrival to its end.",
            ("route",),
            buckets=(*_WAIT_BUCKETS_S, 120, 300),
            registry=registry,
        )
        self.shadows = Counter(
            "modelyard_shadow_requests", "Copies for models on trial, by outcome.", ("model", "outcome"), registry=registry
        )
        self.queued = Gauge("modelyard_requests_queued", "Requests that wait for their turn here.", registry=registry)
        self.flips = Counter(
            "modelyard_route_flips", "Changes of routes that this gateway took over.", ("route",), registry=registry
        )
        self.route_switches.flips = self.flips
        self.tallies: dict[str, Tally] = {}  # by model that exists, for who asks over gRPC and not for Prometheus
        degraded = Gauge(
            "modelyard_degraded", "1 while the site's state cannot be read and the last is served.", registry=registry
        )
        degraded.set_function(lambda: float(view.degraded))
        revision = Gauge("modelyard_site_revision", "Newest revision of the site that is served from.", registry=registry)
        revision.set_function(lambda: float(view.revision))

    def route_label(self, name: str) -> str:
        route = self._view.resolve(name)
        return OTHER if route is None else route.name

    def model_label(self, model: str) -> str:
        return model if model in self._view.models else OTHER

    def tally(self, model: str) -> Tally | None:
        """None of a model that is gone."""
        if model not in self._view.models:
            self.tallies.pop(model, None)
            return None
        return self.tallies.setdefault(model, Tally())

    async def _alone(self) -> bytes:
        return generate_latest(self.registry) + generate_latest(self.shared)


class RouteSwitches:
    """How long a changed route took from its commit, by the clock of who committed it, until this gateway used it."""

    def __init__(self, view: SiteView) -> None:
        self._view = view
        self._known: dict[str, int] | None = None
        self.took = Buckets()
        self.flips: Counter | None = None

    def follow(self) -> None:
        """After each change of the view. What was there before this gateway is no switch."""
        known, first = self._known or {}, self._known is None
        if first and not self._view.revision:
            return
        self._known = {name: route.generation for name, route in self._view.routes.items()}
        for name, generation in self._known.items():
            stored = self._view.desired.objects.get(ObjectKey("Route", name))
            if first or stored is None or generation <= known.get(name, generation):
                continue
            self.took.add(max(time.time() - stored.updated_unix, 0.0))
            if self.flips is not None:
                self.flips.labels(name).inc()


class RequestMeter:
    """Measures one request; `end` is called exactly once."""

    __slots__ = ("_began", "_first", "_metrics", "_route", "_surface")

    def __init__(self, metrics: GatewayMetrics, surface: str, name: str) -> None:
        self._metrics = metrics
        self._surface = surface
        self._route = metrics.route_label(name)
        self._began = time.monotonic()
        self._first = 0.0
        metrics.in_flight.labels(surface).inc()

    def text(self) -> None:
        if not self._first:
            self._first = time.monotonic()
            self._metrics.first_token.labels(self._route).observe(self._first - self._began)

    def end(
        self, model: str, prompt_tokens: int, completion_tokens: int, error: YardError | None, *, cached_tokens: int = 0
    ) -> None:
        metrics, now = self._metrics, time.monotonic()
        metrics.in_flight.labels(self._surface).dec()
        metrics.requests.labels(self._surface, self._route, "ok" if error is None else error.code.value).inc()
        metrics.duration.labels(self._route).observe(now - self._began)
        if self._first and completion_tokens > 1:
            metrics.token.labels(self._route).observe((now - self._first) / (completion_tokens - 1))
        if model:
            label = metrics.model_label(model)
            metrics.prompt_tokens.labels(label).inc(prompt_tokens)
            metrics.cached_tokens.labels(label).inc(min(cached_tokens, prompt_tokens))
            metrics.completion_tokens.labels(label).inc(completion_tokens)
            if (tally := metrics.tally(model)) is not None:
                tally.count(now - self._began, (self._first or now) - self._began, failed=error is not None)
