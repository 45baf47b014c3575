"""The life of one generation under one gRPC call."""

from __future__ import annotations

import asyncio
import logging
from typing import Generic, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message

from gateway.api.errors import ErrorCode, YardError
from gateway.api.proto.pool_pb2 import Hold
from gateway.servers import slow_reader
from gateway.servers.choice_stream import ChoiceDelta
from gateway.servers.generation import Generation
from gateway.servers.generation_group import GenerationGroup
from gateway.servers.generation_path import GenerationPath
from gateway.servers.grpc_errors import abort
from gateway.servers.metrics import GatewayMetrics, RequestMeter

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext
Asked = TypeVar("Asked", Generation, GenerationGroup)


def headers(context: Context) -> dict[str, str]:
    return {
        key: value if isinstance(value, str) else value.decode("latin-1") for key, value in context.invocation_metadata() or ()
    }


def deadline(context: Context) -> float | None:
    """On the clock of the running loop."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else asyncio.get_running_loop().time() + remaining_s


class GrpcCall(Generic[Asked]):
    """Deadlines come from the call; a call that ends for whatever reason ends its generation at once.

    call = GrpcCall(path, metrics, surface, generation, context)
    try:
        news = await call.start()
        … await call.write(…)
    except YardError as error:
        await call.abort(error)
    finally:
        call.end()
    """

    def __init__(self, path: GenerationPath, metrics: GatewayMetrics, surface: str, generation: Asked, context: Context) -> None:
        self._path = path
        self._context = context
        self._writes = slow_reader.WriteWatch()
        self._error: YardError | None = YardError(ErrorCode.CANCELLED, "the client left")
        self.generation = generation
        self.first: Generation = generation.first if isinstance(generation, GenerationGroup) else generation
        self.meter = RequestMeter(metrics, surface, self.first.request.model)
        # The handler's own cancellation comes too late, or never, for many of the calls of a connection that closes.
        context.add_done_callback(self._left)  # pyright: ignore[reportArgumentType] - the stubs want a class of their own

    def _left(self, _: object) -> None:
        self.generation.close()

    async def start(self) -> list[ChoiceDelta] | Hold | None:
        """The first news. They come before the headers, which say who answers."""
        await self.generation.start()
        news = await self.generation.receive()
        resolved = self.first.resolved
        assert resolved is not None
        metadata = [
            ("modelyard-model", resolved.model),
            ("modelyard-route", resolved.route),
            ("modelyard-route-generation", str(resolved.route_generation)),
            ("modelyard-request-id", self.first.request.request_id),
        ]
        if isinstance(news, Hold):  # also for calls that answer whole, which see nothing else of it
            metadata.append(("modelyard-estimated-wait-ms", str(news.estimated_wait_ms)))
        if self._path.view.degraded:
            metadata.append(("modelyard-degraded", "true"))
            self._context.set_trailing_metadata((("modelyard-degraded", "true"),))
        await self._context.send_initial_metadata(tuple(metadata))
        self._error = None
        return news

    async def write(self, chunk: Message) -> None:
        """Ends the call when the client does not read. Cancelled, because a status would wait behind what is not read."""
        self._writes.begins()
        try:
            await self._context.write(chunk)
        except asyncio.CancelledError:
            if self._writes.gave_up:
                self._error = slow_reader.gave_up()
                log.warning("request %s: %s", self.first.request.request_id, self._error.message)
            raise
        self._writes.ends()

    async def abort(self, error: YardError) -> NoReturn:
        self._error = error
        await abort(self._context, error, degraded=self._path.view.degraded)

    def end(self) -> None:
        self._writes.close()
        generation = self.generation
        finished = generation.done
        generation.close()
        if self._error is None and not finished:
            self._error = YardError(ErrorCode.CANCELLED, "the client left")
        usage = generation.usage
        self.meter.end(self.first.model, usage.prompt_tokens, generation.tokens, self._error, cached_tokens=usage.cached_tokens)
