"""ModelStreamInfer: any number of requests on one stream, answered side by side, each response naming its request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from gateway.api.errors import ErrorCode, YardError, invalid
from gateway.api.proto.kserve_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from gateway.api.proto.pool_pb2 import Hold
from gateway.api.tasks import cancelled
from gateway.servers import slow_reader
from gateway.servers.choice_stream import ChoiceDelta
from gateway.servers.generation_group import GenerationGroup
from gateway.servers.generation_path import GenerationPath
from gateway.servers.grpc_call import deadline, headers
from gateway.servers.kserve_request import FINAL, VERSION, InferRequest, infer_request
from gateway.servers.metrics import GatewayMetrics, RequestMeter

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext

SURFACE = "kserve"
MAX_RUNNING = 128
"""Requests answered at once on one stream; more are read when one has ended."""
MAX_UNREAD = 64
"""Responses that wait for the client; then the answers wait."""


class KserveStream:
    """One call. A request that fails ends with an error message, and the others go on; the last response of each that does not
    has the parameter `triton_final_response`. When the client leaves, all end at once (rule 10)."""

    def __init__(self, path: GenerationPath, metrics: GatewayMetrics, context: Context) -> None:
        self._path = path
        self._metrics = metrics
        self._context = context
        self._writes = slow_reader.WriteWatch()
        self._headers = headers(context)
        self._deadline = deadline(context)
        self._open: set[GenerationGroup] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(MAX_RUNNING)
        self._responses: asyncio.Queue[ModelStreamInferResponse | None] = asyncio.Queue(MAX_UNREAD)
        # The handler's own cancellation comes too late, or never, for many of the calls of a connection that closes.
        context.add_done_callback(self._left)  # pyright: ignore[reportArgumentType] - the stubs want a class of their own

    def _left(self, _: object) -> None:
        for generation in tuple(self._open):
            generation.close()

    async def serve(self, requests: AsyncIterator[ModelInferRequest]) -> None:
        reader = asyncio.create_task(self._read(requests), name="kserve-requests")
        try:
            while (response := await self._responses.get()) is not None:
                await self._write(response)
            await reader
        finally:
            self._writes.close()
            self._left(None)
            await cancelled([reader, *self._running])

    async def _read(self, requests: AsyncIterator[ModelInferRequest]) -> None:
        try:
            async for request in requests:
                await self._room.acquire()
                task = asyncio.create_task(self._answer(request), name="kserve-request")
                self._running.add(task)
                task.add_done_callback(self._ended)
            while self._running:
                await asyncio.wait(tuple(self._running))
        finally:
            await self._responses.put(None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._room.release()

    async def _write(self, response: ModelStreamInferResponse) -> None:
        """Ends the call when the client does not read, as `GrpcCall.write` does."""
        self._writes.begins()
        try:
            await self._context.write(response)
        except asyncio.CancelledError:
            if self._writes.gave_up:
                log.warning("a stream of %d requests: %s", len(self._running), slow_reader.gave_up().message)
            raise
        self._writes.ends()

    async def _answer(self, asked: ModelInferRequest) -> None:
        meter = RequestMeter(self._metrics, SURFACE, asked.model_name)
        generation: GenerationGroup | None = None
        outcome: YardError | None = YardError(ErrorCode.CANCELLED, "the client left")
        try:
            request = infer_request(asked, now=asyncio.get_running_loop().time(), deadline=self._deadline, headers=self._headers)
            if request.stream and len(request.generations) > 1:
                raise invalid("stream answers one prompt; send each prompt in a request of its own", "stream")
            generation = GenerationGroup(self._path, request.generations)
            self._open.add(generation)
            await generation.start()
            await self._respond(request, generation, meter)
            outcome = None
        except YardError as error:
            outcome = error
            named = ModelInferResponse(model_name=asked.model_name, model_version=VERSION, id=asked.id)
            await self._responses.put(ModelStreamInferResponse(error_message=error.message, infer_response=named))
        finally:
            if generation is None:
                meter.end("", 0, 0, outcome)
            else:
                generation.close()
                self._open.discard(generation)
                usage = generation.usage
                meter.end(
                    generation.first.model, usage.prompt_tokens, generation.tokens, outcome, cached_tokens=usage.cached_tokens
                )

    async def _respond(self, request: InferRequest, generation: GenerationGroup, meter: RequestMeter) -> None:
        if not request.stream:
            await self._put(request, generation, await whole(generation, meter), final=True)
            return
        while (news := await generation.receive()) is not None:
            if isinstance(news, Hold):
                continue
            meter.text()
            await self._put(request, generation, news, final=generation.done)

    async def _put(self, request: InferRequest, generation: GenerationGroup, deltas: list[ChoiceDelta], *, final: bool) -> None:
        response = request.response(deltas, model=generation.first.model)
        response.parameters[FINAL].bool_param = final
        await self._responses.put(ModelStreamInferResponse(infer_response=response))


async def whole(
    generation: GenerationGroup, meter: RequestMeter, news: list[ChoiceDelta] | Hold | None = None
) -> list[ChoiceDelta]:
    """The whole answers, in the order of the prompts. `news`: what was received already."""
    answers: dict[int, ChoiceDelta] = {}
    if news is None:
        news = await generation.receive()
    while news is not None:
        if not isinstance(news, Hold):
            meter.text()
            for delta in news:
                if (answer := answers.setdefault(delta.index, delta)) is not delta:
                    answer.extend(delta)
        news = await generation.receive()
    return [answers[index] for index in sorted(answers)]
