"""The gRPC and the HTTP server of one gateway, over one generation path."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import uvicorn
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection
from starlette.applications import Starlette

from gateway.api.grpc_options import MAX_HEADER_BYTES, MAX_MESSAGE_BYTES, server_options
from gateway.api.proto import admin_pb2, inference_pb2, kserve_pb2
from gateway.api.proto.admin_pb2_grpc import add_AdminServicer_to_server
from gateway.api.proto.inference_pb2_grpc import add_InferenceServicer_to_server
from gateway.api.proto.kserve_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from gateway.api.tasks import cancelled
from gateway.servers import health_service, ports
from gateway.servers.admin_guard import AdminAccess, AdminGuard
from gateway.servers.admin_service import AdminService
from gateway.servers.client_limits import ClientLimits, LimitedApp, LimitedCalls
from gateway.servers.health_service import HealthService
from gateway.servers.http_protocol import bounded_http
from gateway.servers.inference_service import InferenceService
from gateway.servers.kserve_service import KserveService
from gateway.servers.malformed import MalformedRequests
from gateway.servers.tls import ServerTls

log = logging.getLogger(__name__)

INFERENCE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
KSERVE_NAME = kserve_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
ADMIN_NAME = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
START_S = 10.0


@dataclass(frozen=True, slots=True)
class Limits:
    message_bytes: int = MAX_MESSAGE_BYTES
    header_bytes: int = MAX_HEADER_BYTES
    streams_per_client: int = 4096


class _HttpServer(uvicorn.Server):
    """`ready` is set once it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process that we live in."""
        yield


class PublicServers:
    """Both servers on ports that gateways of the site on this node share. Port 0 takes a free one."""

    def __init__(
        self,
        *,
        run_dir: Path,
        host: str,
        grpc_port: int,
        http_port: int,
        tls: ServerTls | None = None,
        limits: Limits = Limits(),
    ) -> None:
        self._tls = tls
        self._limits = limits
        self._clients = ClientLimits(limits.streams_per_client)
        self._watch: asyncio.Task[None] | None = None
        self.host = host
        self.grpc_port = grpc_port
        self.http_port = http_port
        self._claim = ports.claimed_ports(run_dir, host, (grpc_port, http_port))
        self._claimed = False
        self._grpc: grpc.aio.Server | None = None
        self._http: _HttpServer | None = None
        self._http_task: asyncio.Task[None] | None = None

    async def start(
        self,
        inference: InferenceService,
        kserve: KserveService,
        health: HealthService,
        app: Starlette,
        admin: AdminService | None,
        secret: str,
    ) -> None:
        """YardError(CONFLICT) when a port is taken; then nothing is left running."""
        try:
            self._claim.__enter__()
            self._claimed = True
            http_socket = ports.shared_socket(self.host, self.http_port)
            self.http_port = http_socket.getsockname()[1]
            await self._start_grpc(inference, kserve, health, admin, secret)
            config = uvicorn.Config(
                LimitedApp(app, self._clients),
                http=bounded_http(self._limits.header_bytes),  # type: ignore[arg-type]
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                h11_max_incomplete_event_size=self._limits.header_bytes,
            )
            config.load()
            if self._tls is not None:
                config.ssl = self._tls.context
                self._watch = asyncio.create_task(self._tls.watch(), name="tls-watch")
            self._http = _HttpServer(config)
            self._http_task = asyncio.create_task(self._http.serve(sockets=[http_socket]), name="http-server")
            async with asyncio.timeout(START_S):
                await self._http.ready.wait()
        except BaseException:
            await self.stop(0.0)
            raise

    async def _start_grpc(
        self,
        inference: InferenceService,
        kserve: KserveService,
        health: HealthService,
        admin: AdminService | None,
        secret: str,
    ) -> None:
        access = AdminAccess(secret, admin.view if admin else None, loopback=ports.is_loopback(self.host))
        limited = LimitedCalls(self._clients, (INFERENCE_NAME, KSERVE_NAME, ADMIN_NAME))
        options = [*server_options(self._limits.message_bytes, self._limits.header_bytes), ("grpc.so_reuseport", 1)]
        options.append(("grpc.max_concurrent_streams", self._limits.streams_per_client))
        server = grpc.aio.server(options=options, interceptors=[AdminGuard(access), limited, MalformedRequests()])
        add_InferenceServicer_to_server(inference, server)
        add_GRPCInferenceServiceServicer_to_server(kserve, server)
        add_HealthServicer_to_server(health, server)
        names = [INFERENCE_NAME, KSERVE_NAME, health_service.SERVICE_NAME, reflection.SERVICE_NAME]
        if admin is not None:
            add_AdminServicer_to_server(admin, server)
            names.append(ADMIN_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            address = f"[{self.host}]" if ":" in self.host else self.host
            at = f"{address}:{self.grpc_port}"
            tls = self._tls
            self.grpc_port = server.add_secure_port(at, tls.grpc_credentials()) if tls else server.add_insecure_port(at)
        except RuntimeError as error:
            raise ports.taken(self.host, self.grpc_port, "the address is already in use") from error
        await server.start()
        self._grpc = server

    def check(self) -> None:
        """Raises when a server is not running any more."""
        if self._http_task is not None and self._http_task.done():
            self._http_task.result()
            raise RuntimeError("the HTTP server ended by itself")

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, lets running ones finish for `grace_s`, then cancels them."""
        if self._watch is not None:
            await cancelled([self._watch])
        stopping = []
        if self._grpc is not None:
            stopping.append(self._grpc.stop(grace_s))
        if self._http is not None and self._http_task is not None:
            self._http.config.timeout_graceful_shutdown = max(1, round(grace_s))
            self._http.should_exit = True
            self._http.force_exit = grace_s <= 0
            stopping.append(self._http_task)
        results = await asyncio.gather(*stopping, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                log.warning("a server did not stop cleanly: %s", result)
        self._grpc = self._http = self._http_task = None
        if self._claimed:
            self._claimed = False
            self._claim.__exit__(None, None, None)
