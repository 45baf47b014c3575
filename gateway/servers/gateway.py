"""One gateway: what a replica of the `gateway` deployment runs. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path

import msgspec
from prometheus_client.core import Metric

from gateway import drain
from gateway.admission.quotas import Quotas
from gateway.api import logs, tracing
from gateway.api.address import listen_address
from gateway.api.records import HEARTBEAT_S, HEARTBEAT_TTL_S, GatewayRecord
from gateway.api.runtime import Runtime
from gateway.api.tasks import cancelled
from gateway.link.link_set import LinkSet
from gateway.servers import grpc_poller, ports
from gateway.servers.admin_guard import AdminAccess
from gateway.servers.admin_service import AdminService
from gateway.servers.capacity import Capacity
from gateway.servers.generation_path import GenerationPath
from gateway.servers.health_service import HealthService
from gateway.servers.inference_service import InferenceService
from gateway.servers.kserve_repository import KserveRepository
from gateway.servers.kserve_service import KserveService
from gateway.servers.metrics import GatewayMetrics
from gateway.servers.node_metrics import NodeMetrics
from gateway.servers.openai_http import openai_app
from gateway.servers.public_servers import ADMIN_NAME, INFERENCE_NAME, KSERVE_NAME, Limits, PublicServers
from gateway.servers.server_metrics import ServerMetrics
from gateway.servers.tls import ServerTls
from gateway.state.connection import LOST
from gateway.state.feed import SiteFeed
from gateway.state.history import History
from gateway.state.store import SiteStore
from gateway.state.view import SiteView
from gateway.text.library import Loader, TextLibrary, checkpoint_loader

log = logging.getLogger(__name__)

# Load balancers look at /ready and health about once a second; the listeners stay open for so long after "not ready".
ANNOUNCE_S = 1.0
# Below Serve's graceful_shutdown_timeout_s of the deployment.
DRAIN_S = 25.0
# Before the servers end what still runs by cancelling it, requests are told why, with a status that clients repeat.
TELL_S = 1.0
HEARTBEAT = "heartbeat"

Export = Callable[[Callable[[], Iterable[Metric]]], Coroutine[None, None, None]]


class Gateway:
    """Follows the site's state, keeps a link to every pool, and serves the public surfaces.

    Without Redis it goes on with the last snapshot, marked degraded (rule 12); before the first snapshot it listens but is
    not ready. All of it runs in the loop that calls `start`.
    """

    def __init__(self, runtime: Runtime, *, load_text: Loader | None = None, export: Export | None = None) -> None:
        """`export` is given what `/metrics` shows of this gateway and of the pools, to hand it on for as long as it runs."""
        self._runtime = runtime
        self._id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._tasks: list[asyncio.Task[None]] = []
        self.view = SiteView()
        self._store = SiteStore(runtime.redis_url, runtime.site)
        self._links = LinkSet(gateway=self._id, secret=runtime.secret)
        self._library = TextLibrary(load_text or checkpoint_loader(Path(runtime.cache_dir)))
        self._quotas = Quotas(self.view, self._store, runtime.quotas_without_redis)
        self._path = GenerationPath(self.view, self._library, self._links, random.Random(), self._quotas)
        self._metrics = GatewayMetrics(self.view)
        self._metrics.queued.set_function(lambda: float(self._path.gate.waiting))
        self._node_metrics = NodeMetrics(Path(runtime.run_dir), self._metrics.registry, self._metrics.shared)
        self._metrics.exposition = self._node_metrics.text
        self._export = export
        self._path.shadows.outcomes = self._metrics.shadows
        self._health = HealthService(self._path, (INFERENCE_NAME, KSERVE_NAME, ADMIN_NAME))
        self.servers = PublicServers(
            run_dir=Path(runtime.run_dir),
            host=listen_address(runtime.bind_host),
            grpc_port=runtime.grpc_port,
            http_port=runtime.http_port,
            tls=ServerTls(runtime.tls) if runtime.tls else None,
            limits=Limits(runtime.max_message_bytes, runtime.max_header_bytes, runtime.streams_per_client),
        )

    async def start(self) -> None:
        """YardError when an address cannot be listened on."""
        tracing.start("modelyard-gateway")
        self.view.subscribe(self._follow)
        self._links.on_server = self._health.refresh
        self._metrics.registry.register(ServerMetrics(self._links))
        await self._node_metrics.start()
        logs.install(Path(self._runtime.run_dir), f"gateway-{self._node_metrics.place}")
        admin = AdminService(self._store, self.view, self._runtime)
        repository = KserveRepository(self.view, admin)
        await self.servers.start(
            InferenceService(self._path, self._metrics),
            KserveService(self._path, self._metrics, self._health, repository, self._runtime.version),
            self._health,
            openai_app(self._path, self._metrics, self._health, self._capacity().routes()),
            admin,
            self._runtime.secret,
        )
        grpc_poller.yield_to_loop()
        self._spawn(SiteFeed(self.view, self._store).run(), "site-feed")
        self._spawn(self._quotas.run(), "quotas")
        self._spawn(self._heartbeat(), HEARTBEAT)
        self._spawn(self._accept_when_synced(), "first-snapshot")
        if self._export is not None:
            self._spawn(self._export(self._node_metrics.families), "metrics-export")
        host = self.servers.host
        log.info("gateway %s: gRPC on %s:%d, HTTP on %s:%d", self._id, host, self.grpc_port, host, self.http_port)

    def _capacity(self) -> Capacity:
        access = AdminAccess(self._runtime.secret, self.view, loopback=ports.is_loopback(self.servers.host))
        return Capacity(self._runtime.site, self._path, access, History(self._store))

    @property
    def grpc_port(self) -> int:
        return self.servers.grpc_port

    @property
    def http_port(self) -> int:
        return self.servers.http_port

    def check_health(self) -> None:
        """Raises what ended one of the tasks that must never end."""
        self.servers.check()
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise RuntimeError(f"{task.get_name()} of the gateway ended: {error}") from error

    async def stop(self, drain_s: float = DRAIN_S) -> None:
        """Announces that it is not ready, lets running requests finish for at most `drain_s`, then ends."""
        announced = not self._health.accepting
        self._health.set_accepting(False)
        await cancelled([task for task in self._tasks if task.get_name() == HEARTBEAT])  # it would put the record back
        await self._forget()
        if not announced:
            await asyncio.sleep(min(ANNOUNCE_S, drain_s))
        telling = asyncio.create_task(self._end_requests(drain_s - TELL_S), name="end-requests")
        await self.servers.stop(drain_s)
        await cancelled([telling])
        await self._node_metrics.stop()
        await self._path.shadows.close()
        await cancelled(self._tasks)
        await self._links.close()
        await self._store.close()
        tracing.stop()

    async def _end_requests(self, after_s: float) -> None:
        await asyncio.sleep(max(0.0, after_s))
        await cancelled(self._tasks)  # the feed would make new links
        await self._links.close()

    def _spawn(self, coroutine, name: str) -> None:
        self._tasks.append(asyncio.create_task(coroutine, name=name))

    def _follow(self) -> None:
        """After each change of the view."""
        self._metrics.route_switches.follow()
        self._links.reconcile(self.view.pools)
        self._links.follow_servers(self.view.models)
        self._library.prefetch(self.view.models)
        self._quotas.tenants_changed()
        self._health.refresh()

    async def _accept_when_synced(self) -> None:
        await self.view.wait_synced()
        self._health.set_accepting(True)

    async def _heartbeat(self) -> None:
        keys, redis = self._store.keys, self._store.redis
        known = False
        states: list[tuple[str, str]] = []  # of servers that run elsewhere
        while True:
            if self._health.accepting and drain.asked(Path(self._runtime.run_dir)):
                self._health.set_accepting(False)
            found = self._record()
            before, states = states, [(group.model, group.state) for group in found.servers]
            record = msgspec.json.encode(found)
            try:
                async with redis.pipeline(transaction=False) as pipe:
                    pipe.set(keys.gateway(self._id), record, px=int(HEARTBEAT_TTL_S * 1000))
                    pipe.sadd(keys.gateways, self._id)
                    if not known or states != before:
                        pipe.publish(keys.observed, f"gateway:{self._id}")
                    await pipe.execute()
                known = True
            except LOST as error:
                if known:
                    log.warning("heartbeat is not heard: %s", error)
                known = False
            await asyncio.sleep(HEARTBEAT_S)

    async def _forget(self) -> None:
        keys, redis = self._store.keys, self._store.redis
        with contextlib.suppress(*LOST):
            async with redis.pipeline(transaction=False) as pipe:
                pipe.delete(keys.gateway(self._id))
                pipe.srem(keys.gateways, self._id)
                pipe.publish(keys.observed, f"gateway:{self._id}")
                await pipe.execute()

    def _record(self) -> GatewayRecord:
        host = self.servers.host
        return GatewayRecord(
            gateway=self._id,
            node=socket.gethostname(),
            pid=os.getpid(),
            grpc_endpoint=f"{host}:{self.grpc_port}",
            http_endpoint=f"{host}:{self.http_port}",
            revision=self.view.revision,
            heartbeat_unix=time.time(),
            requests_in_flight=self._links.in_flight,
            degraded=self.view.degraded,
            version=self._runtime.version,
            servers=self._links.servers(),
        )
