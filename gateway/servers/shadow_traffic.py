"""Copies of requests for models that are tried beside those that answer."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import TYPE_CHECKING

from prometheus_client import Counter

from gateway.api.errors import YardError
from gateway.api.tasks import cancelled
from gateway.servers.request import GenerationRequest

if TYPE_CHECKING:
    from gateway.servers.generation_path import GenerationPath

log = logging.getLogger(__name__)

LONGEST_S = 120.0


class ShadowTraffic:
    """Sends copies and drops what comes of them. Nobody waits for them, they take of no quota, and pool drivers put them last.

    A copy is left out when the route has as many under way as it may, when nothing can answer it at once, or when requests
    wait for that model: with something better to do it gets none.
    """

    def __init__(self, path: GenerationPath) -> None:
        self._path = path
        self._running: dict[str, set[asyncio.Task[None]]] = {}
        self.outcomes: Counter | None = None  # by model and outcome; set by the gateway's metrics

    def offer(self, request: GenerationRequest, model: str) -> None:
        """Called with a request that was let through; returns at once."""
        running = self._running.setdefault(model, set())
        if len(running) >= self._limit(request.model) or self._is_busy(model):
            self._count(model, "dropped")
            return
        copy = dataclasses.replace(
            request, model=model, request_id=f"shadow-{request.request_id}"[:256], n=1, deadline=None, headers={}, shadow=True
        )
        task = asyncio.create_task(self._answer(copy), name=f"shadow-{model}")
        running.add(task)
        task.add_done_callback(running.discard)

    async def close(self) -> None:
        await cancelled(task for running in self._running.values() for task in running)

    def _limit(self, name: str) -> int:
        route = self._path.view.resolve(name)
        return route.spec.shadow.concurrency if route and route.spec and route.spec.shadow else 0

    def _is_busy(self, model: str) -> bool:
        links = self._path.links.rotation(model)
        return not any(link.ready_groups(model) and not link.load.waiting(model) for link in links)

    async def _answer(self, copy: GenerationRequest) -> None:
        from gateway.servers.generation import Generation

        copy.deadline = asyncio.get_running_loop().time() + LONGEST_S
        generation = Generation(self._path, copy)
        try:
            await generation.start()
            while await generation.receive() is not None:
                pass
            self._count(copy.model, "answered")
        except YardError as error:
            self._count(copy.model, "failed")
            log.debug("shadow request to %s: %s", copy.model, error)
        finally:
            generation.close()

    def _count(self, model: str, outcome: str) -> None:
        if self.outcomes is not None:
            self.outcomes.labels(model, outcome).inc()
