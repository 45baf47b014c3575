"""The driver's gRPC server: PoolLink for gateways, PoolControl for the controller. Every call carries the site's secret; with
TLS, nobody without a certificate of the site comes as far as that."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec
import psutil

from gateway.api.errors import YardError
from gateway.api.grpc_options import SERVER_OPTIONS
from gateway.api.pool_channel import TLS_SCHEME
from gateway.api.proto import pool_pb2, pool_pb2_grpc
from gateway.api.records import PoolRecord
from gateway.api.runtime import SECRET_METADATA_KEY
from workers.driver.loop import PoolLoop
from workers.driver.wire import request_of, wanted_of

HANDOVER_S = 30.0
"""Longer than a driver that stops lets its requests finish, and about as long as Serve lets it live then."""
HANDOVER_POLL_S = 0.1

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class SecretInterceptor(grpc.aio.ServerInterceptor):
    """UNAUTHENTICATED for who does not know the site's secret (rule 15)."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

        async def refuse(_request: object, context: grpc.aio.ServicerContext) -> None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, f"metadata {SECRET_METADATA_KEY!r} does not hold this site's secret"
            )

        self._refuse_unary = grpc.unary_unary_rpc_method_handler(refuse)
        self._refuse_stream = grpc.stream_stream_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        given = dict(handler_call_details.invocation_metadata).get(SECRET_METADATA_KEY, "")
        if hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._secret):
            return await continuation(handler_call_details)
        return self._refuse_stream if handler_call_details.method.endswith("/Link") else self._refuse_unary


class PoolLinkService(pool_pb2_grpc.PoolLinkServicer):
    def __init__(self, loop: PoolLoop) -> None:
        self._loop = loop

    async def Link(
        self, request_iterator: AsyncIterator[pool_pb2.UpFrame], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pool_pb2.DownFrame]:
        """One gateway. The stream's end, however it comes, cancels every request that came over it."""
        link, outbox = self._loop.open_link(gateway="")
        # The handler's own cancellation does not come in every case of a closed connection; this callback does.
        context.add_done_callback(lambda _: self._loop.close_link(link))  # pyright: ignore[reportArgumentType]
        reading = asyncio.create_task(self._read(link, request_iterator), name=f"link-{link}")
        reading.add_done_callback(lambda _: outbox.close())
        try:
            while (frame := await outbox.next_frame()) is not None:
                yield frame
            await reading
        except YardError as error:
            await context.abort(error.grpc_status, error.message)
        finally:
            reading.cancel()
            self._loop.close_link(link)

    async def _read(self, link: int, frames: AsyncIterator[pool_pb2.UpFrame]) -> None:
        async for frame in frames:
            if frame.cancels:
                self._loop.cancel([(link, request) for request in frame.cancels])
            if frame.submits:
                now = self._loop.now()
                self._loop.submit([request_of(link, submit, now) for submit in frame.submits])


class PoolControlService(pool_pb2_grpc.PoolControlServicer):
    def __init__(self, loop: PoolLoop, record: Callable[[], PoolRecord]) -> None:
        self._loop = loop
        self._record = record

    async def Assign(self, request: pool_pb2.AssignRequest, context: grpc.aio.ServicerContext) -> pool_pb2.AssignResponse:
        try:
            wanted = [group for assignment in request.assignments for group in wanted_of(assignment)]
            self._loop.assign(request.fence, request.revision, wanted)
        except YardError as error:
            await context.abort(error.grpc_status, error.message)
        return pool_pb2.AssignResponse(fence=self._loop.core.state.fence)

    async def Describe(
        self, request: pool_pb2.DescribePoolRequest, context: grpc.aio.ServicerContext
    ) -> pool_pb2.DescribePoolResponse:
        del request, context
        return pool_pb2.DescribePoolResponse(pool_json=msgspec.json.encode(self._record()).decode())

    async def SetResidency(
        self, request: pool_pb2.SetResidencyRequest, context: grpc.aio.ServicerContext
    ) -> pool_pb2.SetResidencyResponse:
        try:
            state = self._loop.set_residency(request.fence, request.model, request.residency)
        except YardError as error:
            await context.abort(error.grpc_status, error.message)
        return pool_pb2.SetResidencyResponse(residency=state)


class PoolServer:
    """Listens on a port of `host`: that of the driver before it on this node if that is free, else any.

    So gateways find a restarted driver also while Redis, which would tell them of it, is away (rule 12). `port_file` keeps it,
    and who listened there: an earlier driver that still finishes its requests is waited for, since a pool has one (rule 1).
    """

    def __init__(
        self, loop: PoolLoop, record: Callable[[], PoolRecord], secret: str, host: str, port_file: Path, *, tls: bool = False
    ) -> None:
        self._host = host
        self._credentials = _credentials(secret) if tls else None
        self._port_file = port_file
        # Two drivers never share a port, as gRPC would let them.
        options = [*SERVER_OPTIONS, ("grpc.so_reuseport", 0)]
        self._server = grpc.aio.server(interceptors=[SecretInterceptor(secret)], options=options)
        pool_pb2_grpc.add_PoolLinkServicer_to_server(PoolLinkService(loop), self._server)
        pool_pb2_grpc.add_PoolControlServicer_to_server(PoolControlService(loop, record), self._server)
        self.endpoint = ""

    async def start(self) -> str:
        """Its endpoint, see `PoolRecord`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        port, owner = self._earlier()
        end = time.monotonic() + HANDOVER_S
        while owner not in (0, os.getpid()) and psutil.pid_exists(owner) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(HANDOVER_POLL_S)
        port = self._bind(host, port)
        await self._server.start()
        self._port_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._port_file.write_text(f"{port} {os.getpid()}")
        self.endpoint = f"{TLS_SCHEME if self._credentials else ''}{host}:{port}"
        return self.endpoint

    def _earlier(self) -> tuple[int, int]:
        """(port, process) of the driver before this one on this node; zeros when there was none."""
        with contextlib.suppress(OSError, ValueError):
            port, owner = map(int, self._port_file.read_text().split())
            return port, owner
        return 0, 0

    def _bind(self, host: str, port: int) -> int:
        with contextlib.suppress(RuntimeError):
            return self._listen(f"{host}:{port}")
        return self._listen(f"{host}:0")

    def _listen(self, address: str) -> int:
        if self._credentials is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, self._credentials)

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)


def _credentials(secret: str) -> grpc.ServerCredentials:
    from gateway.api.site_tls import site_tls  # imports cryptography, which sites on loopback do without

    return site_tls(secret).server_credentials()
