"""How many requests one client may have open at one gateway: by its API key, else by the address that it comes from."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.admission.caller import AUTHORIZATION
from gateway.api.errors import ErrorCode, YardError
from gateway.servers.grpc_errors import abort
from gateway.servers.openai_format import error_body

RETRY_AFTER_S = 1.0
_UNLIMITED = ("/health", "/ready", "/metrics")


class ClientLimits:
    """Bounded itself: a client without open requests is not known."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._open: Counter[str] = Counter()

    @contextmanager
    def stream(self, client: str) -> Iterator[None]:
        """YardError(EXHAUSTED) when it has as many as it may."""
        if self._open[client] >= self._streams:
            raise YardError(
                ErrorCode.EXHAUSTED,
                f"{self._streams} requests of this client are open at this gateway; end some, or raise "
                "spec.listen.streams_per_client of the Site",
                retry_after_s=RETRY_AFTER_S,
            )
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]

    def __len__(self) -> int:
        return len(self._open)


def client_of(authorization: str, address: str) -> str:
    """The key is kept as a digest only."""
    return hashlib.sha256(authorization.encode("utf-8", "replace")).hexdigest() if authorization else address


class LimitedApp:
    """ASGI: an application with the limit before it."""

    def __init__(self, app: ASGIApp, limits: ClientLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNLIMITED:
            await self._app(scope, receive, send)
            return
        authorization = next((value.decode("latin-1") for key, value in scope["headers"] if key == AUTHORIZATION.encode()), "")
        try:
            with self._limits.stream(client_of(authorization, (scope.get("client") or ("",))[0])):
                await self._app(scope, receive, send)
        except YardError as error:
            headers = {"retry-after": str(round(error.retry_after_s or RETRY_AFTER_S))}
            await JSONResponse(error_body(error), error.http_status, headers)(scope, receive, send)


class LimitedCalls(grpc.aio.ServerInterceptor):
    """The same before every method of the services named; health checks and reflection are left alone."""

    def __init__(self, limits: ClientLimits, services: tuple[str, ...]) -> None:
        self._limits = limits
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._wrapped: dict[str, Any] = {}  # by method; bounded by those that exist

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(self._prefixes):
            return handler
        if method not in self._wrapped:
            self._wrapped[method] = self._wrap(handler)
        return self._wrapped[method]

    def _wrap(self, handler: Any) -> Any:
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        kind = next(kind for kind in kinds if getattr(handler, kind) is not None)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        behaviour = self._limited(getattr(handler, kind))
        return make(behaviour, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer)

    def _limited(self, behaviour: Callable[[Any, grpc.aio.ServicerContext], Any]) -> Callable[..., Any]:
        async def whole(request: Any, context: grpc.aio.ServicerContext) -> Any:
            try:
                with self._limits.stream(_client(context)):
                    return await behaviour(request, context)
            except YardError as error:
                await abort(context, error)

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            try:
                with self._limits.stream(_client(context)):
                    async for message in behaviour(request, context):
                        yield message
            except YardError as error:
                await abort(context, error)

        return stream if inspect.isasyncgenfunction(behaviour) else whole


def _client(context: grpc.aio.ServicerContext) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == AUTHORIZATION:
            return client_of(value if isinstance(value, str) else value.decode("latin-1"), "")
    return client_of("", context.peer().rpartition(":")[0])
