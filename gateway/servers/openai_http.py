"""OpenAI's HTTP surface, and what a load balancer and Prometheus read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.admission.caller import identify
from gateway.api.errors import YardError
from gateway.routing import route_table
from gateway.servers.generation_path import GenerationPath
from gateway.servers.health_service import HealthService
from gateway.servers.http_reply import retry_after
from gateway.servers.metrics import GatewayMetrics
from gateway.servers.openai_embeddings import EmbeddingsEndpoint, embeddings_request
from gateway.servers.openai_endpoint import GenerationEndpoint
from gateway.servers.openai_format import error_body
from gateway.servers.openai_request import chat_request, completion_request
from gateway.state.snapshot import ObjectKey

log = logging.getLogger(__name__)


def openai_app(path: GenerationPath, metrics: GatewayMetrics, health: HealthService, pages: Sequence[Route] = ()) -> Starlette:
    """`pages`: what is served beside it."""
    site = _SiteEndpoints(path, metrics, health)
    chat = GenerationEndpoint(path, metrics, chat_request)
    completions = GenerationEndpoint(path, metrics, completion_request)
    embeddings = EmbeddingsEndpoint(path, metrics, embeddings_request)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            Route("/v1/models", site.models, methods=["GET"]),
            Route("/v1/models/{name:path}", site.model, methods=["GET"]),
            Route("/health", site.health, methods=["GET"]),
            Route("/ready", site.ready, methods=["GET"]),
            Route("/metrics", site.metrics, methods=["GET"]),
            *pages,
        ],
        exception_handlers={HTTPException: _http_error, YardError: _yard_error},
    )


class _SiteEndpoints:
    def __init__(self, path: GenerationPath, metrics: GatewayMetrics, health: HealthService) -> None:
        self._path = path
        self._metrics = metrics
        self._health = health

    async def models(self, request: Request) -> Response:
        caller = identify(self._path.view, dict(request.headers))
        names = route_table.listed(self._path.view, caller.may_ask)
        data = [{**self._model(route), "id": name} for name, route in names]
        return self._json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        identify(self._path.view, dict(request.headers)).check_name(self._path.view, name)
        resolved = self._path.resolve(name)
        route = self._path.view.resolve(resolved.route)
        assert route is not None
        return self._json({**self._model(route), "id": name})

    async def health(self, request: Request) -> Response:
        """Alive. Without Redis it goes on serving, so that is no reason to restart it."""
        view = self._path.view
        status = {"status": "degraded", "reason": view.degraded_reason} if view.degraded else {"status": "ok"}
        return self._json({**status, "revision": view.revision})

    async def ready(self, request: Request) -> Response:
        if self._health.accepting:
            return self._json({"status": "ready"})
        return self._json({"status": "not ready: the site was not read yet, or this gateway is draining"}, 503)

    async def metrics(self, request: Request) -> Response:
        return Response(await self._metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    def _model(self, route: route_table.RouteEntry) -> dict[str, Any]:
        stored = self._path.view.desired.objects.get(ObjectKey("Model" if route.implicit else "Route", route.name))
        return {
            "id": route.name,
            "object": "model",
            "created": int(stored.updated_unix) if stored else 0,
            "owned_by": "modelyard",
            "ready": any(self._path.ready(model) for model, weight in route.targets if weight > 0),
        }

    def _json(self, body: dict[str, Any], status: int = 200) -> Response:
        headers = {"x-modelyard-degraded": "true"} if self._path.view.degraded else None
        return JSONResponse(body, status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = {"error": {"message": error.detail, "type": "invalid_request_error", "param": None, "code": None}}
    if error.status_code == 404:
        body["error"]["message"] = f"no such path: {request.method} {request.url.path}"
    return JSONResponse(body, error.status_code, error.headers)


async def _yard_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, YardError)
    headers = {key.decode(): value.decode() for key, value in retry_after(error)}
    return JSONResponse(error_body(error), error.http_status, headers)
