"""One controller: what the replica of the `controller` deployment runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid
from pathlib import Path

from gateway.api.runtime import Runtime
from gateway.api.tasks import cancelled
from gateway.controller.loop import ControllerLoop
from gateway.controller.model_requests import Checkpoints
from gateway.controller.site_effects import SiteEffects
from gateway.state.feed import SiteFeed
from gateway.state.lease import Lease
from gateway.state.store import SiteStore
from gateway.state.view import SiteView


class ControllerReplica:
    """Follows the site and acts on it while it holds the lease; any number of them may run."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._tasks: list[asyncio.Task[None]] = []
        self._closers = contextlib.AsyncExitStack()

    async def start(self) -> None:
        runtime = self._runtime
        store = SiteStore(runtime.redis_url, runtime.site)
        self._closers.push_async_callback(store.close)
        view = SiteView()
        lease = Lease(store, self._owner)
        effects = SiteEffects(runtime, store, lease, f"controller {self._owner}")
        self._closers.push_async_callback(effects.close)
        checkpoints = Checkpoints(Path(runtime.cache_dir), lambda: self._loop.wake())
        self._closers.callback(checkpoints.close)
        self._loop = ControllerLoop(view, lease, effects, checkpoints, owner=self._owner)
        self._tasks = [
            asyncio.create_task(SiteFeed(view, store).run(), name="controller-feed"),
            asyncio.create_task(self._loop.run(), name="controller-loop"),
        ]

    async def stop(self) -> None:
        """Ends the passes and lets the next controller begin at once. What runs goes on running."""
        # The loop first: it gives its lease back through the store.
        for task in reversed(self._tasks):
            await cancelled([task])
        self._tasks = []
        await self._closers.aclose()

    def check_health(self) -> None:
        """Raises when a task that must never end has ended, or no pass goes through."""
        for task in self._tasks:
            if task.done():
                error = None if task.cancelled() else task.exception()
                raise RuntimeError(f"{task.get_name()} ended: {error}") from error
        if self._tasks:
            self._loop.check_health()
