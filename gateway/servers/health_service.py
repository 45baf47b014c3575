"""grpc.health.v1 for the gateway ("" and the service names) and for every route, alias and model."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

from gateway.api.errors import shortened
from gateway.servers.generation_path import GenerationPath

SERVING = HealthCheckResponse.SERVING
NOT_SERVING = HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = HealthCheckResponse.SERVICE_UNKNOWN

SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class HealthService(HealthServicer):
    """Statuses follow the site view: `refresh` is its subscriber.

    "" and the gateway's own services serve once the site was read, until the gateway drains. A name serves while a pool
    holds a model behind it. A name that the site does not have is NOT_FOUND in Check and SERVICE_UNKNOWN in Watch; Watch
    goes on, as the name may come.
    """

    def __init__(self, path: GenerationPath, services: tuple[str, ...]) -> None:
        self._path = path
        self._services = ("", *services)
        self._statuses: dict[str, HealthCheckResponse.ServingStatus] = dict.fromkeys(self._services, NOT_SERVING)
        self.accepting = False
        self._changed = asyncio.Event()

    def refresh(self) -> None:
        view, path = self._path.view, self._path
        own = SERVING if self.accepting else NOT_SERVING
        statuses = dict.fromkeys(self._services, own)
        ready = {model: path.ready(model) for model in view.models}
        for model, is_ready in ready.items():
            statuses[model] = SERVING if is_ready and own == SERVING else NOT_SERVING
        for route in view.routes.values():
            serves = own == SERVING and any(ready.get(model, False) for model, weight in route.targets if weight > 0)
            for name in (route.name, *route.aliases):
                statuses[name] = SERVING if serves else NOT_SERVING
        if statuses != self._statuses:
            self._statuses = statuses
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def set_accepting(self, accepting: bool) -> None:
        """True once the site was read; False when the gateway drains."""
        self.accepting = accepting
        self.refresh()

    def serves(self, name: str) -> bool:
        """Whether a route, alias or model of this name can be asked."""
        return name not in self._services and self._statuses.get(name) == SERVING

    async def Check(self, request: HealthCheckRequest, context: grpc.aio.ServicerContext) -> HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service, route or model `{shortened(request.service)}`")
        return HealthCheckResponse(status=status)

    async def Watch(self, request: HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        last = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, SERVICE_UNKNOWN)
            if status != last:
                await context.write(HealthCheckResponse(status=status))
                last = status
            await changed.wait()
