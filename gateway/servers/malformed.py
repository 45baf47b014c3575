"""Bytes that are no message of the method's type are the caller's fault; gRPC itself would end the call as UNKNOWN."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from gateway.api.errors import YardError, invalid
from gateway.servers.grpc_errors import abort

Handler = grpc.RpcMethodHandler
Context = grpc.aio.ServicerContext


@dataclass(frozen=True, slots=True)
class _Malformed:
    reason: str


class _Unreadable(Exception):
    """A message of a stream of requests is no message."""


class MalformedRequests(grpc.aio.ServerInterceptor):
    """INVALID_ARGUMENT for what cannot be read."""

    def __init__(self) -> None:
        self._wrapped: dict[str, Handler] = {}  # by method; bounded by those that exist

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        method = handler_call_details.method
        if method not in self._wrapped:
            self._wrapped[method] = _wrapped(handler)
        return self._wrapped[method]


def _wrapped(handler: Any) -> Handler:
    deserialize = handler.request_deserializer

    def read(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except DecodeError as error:
            return _Malformed(str(error))

    if handler.request_streaming:
        make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
        behaviour = _checked_stream(handler.stream_stream if handler.response_streaming else handler.stream_unary)
        return make(behaviour, request_deserializer=read, response_serializer=handler.response_serializer)
    make = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    behaviour = _checked(handler.unary_stream if handler.response_streaming else handler.unary_unary)
    return make(behaviour, request_deserializer=read, response_serializer=handler.response_serializer)


def _checked(behaviour: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
    async def whole(request: Any, context: Context) -> Any:
        await _refuse_malformed(request, context)
        return await behaviour(request, context)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        await _refuse_malformed(request, context)
        async for message in behaviour(request, context):
            yield message

    return stream if inspect.isasyncgenfunction(behaviour) else whole


def _checked_stream(behaviour: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
    async def whole(requests: AsyncIterator[Any], context: Context) -> Any:
        try:
            return await behaviour(_readable(requests), context)
        except _Unreadable as error:
            await abort(context, _refusal(str(error)))

    async def stream(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        try:
            async for message in behaviour(_readable(requests), context):
                yield message
        except _Unreadable as error:
            await abort(context, _refusal(str(error)))

    return stream if inspect.isasyncgenfunction(behaviour) else whole


async def _readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, _Malformed):
            raise _Unreadable(request.reason)
        yield request


async def _refuse_malformed(request: Any, context: Context) -> None:
    if isinstance(request, _Malformed):
        await abort(context, _refusal(request.reason))


def _refusal(reason: str) -> YardError:
    return invalid(f"the request cannot be read: {reason}")
