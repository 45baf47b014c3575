"""modelyard.v1.Inference over gRPC."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc

from gateway.admission.caller import identify
from gateway.api.errors import ErrorCode, YardError, invalid
from gateway.api.proto.inference_pb2 import (
    ChatRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    Embedding,
    EmbedRequest,
    EmbedResponse,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    GenerateResponse,
    Held,
    ListModelsRequest,
    ListModelsResponse,
    Message,
    ModelInfo,
    TokenizeRequest,
    TokenizeResponse,
    Usage,
)
from gateway.api.proto.inference_pb2 import TokenLogprob as TokenLogprobMessage
from gateway.api.proto.inference_pb2_grpc import InferenceServicer
from gateway.api.proto.pool_pb2 import Hold
from gateway.routing import route_table
from gateway.servers.choice_stream import ChoiceDelta, TokenLogprob
from gateway.servers.generation import Generation
from gateway.servers.generation_group import GenerationGroup
from gateway.servers.generation_path import GenerationPath
from gateway.servers.grpc_call import GrpcCall, deadline, headers
from gateway.servers.grpc_errors import abort
from gateway.servers.metrics import GatewayMetrics
from gateway.servers.openai_embeddings import MAX_TEXTS, vector
from gateway.servers.request import MAX_MESSAGES, GenerationRequest, Sampling, check_ids, check_messages, too_many

T = TypeVar("T")

MAX_TEXT = 2**20  # characters or ids to tokenize or detokenize in one request
INLINE_TOKENS = 1024

_FINISH = {
    "": FinishReason.FINISH_REASON_UNSPECIFIED,
    "stop": FinishReason.FINISH_REASON_STOP,
    "length": FinishReason.FINISH_REASON_LENGTH,
    "cancelled": FinishReason.FINISH_REASON_CANCELLED,
    "content_filter": FinishReason.FINISH_REASON_CONTENT_FILTER,
}
_SAMPLING_FIELDS = tuple(Sampling.__slots__)

Context = grpc.aio.ServicerContext


class InferenceService(InferenceServicer):
    """Deadlines come from the call; a call that ends for whatever reason ends its generation at once."""

    def __init__(self, path: GenerationPath, metrics: GatewayMetrics) -> None:
        self._path = path
        self._metrics = metrics

    async def Generate(self, request: GenerateRequest, context: Context) -> GenerateResponse:
        return await self._whole(request, context)

    async def Chat(self, request: ChatRequest, context: Context) -> GenerateResponse:
        return await self._whole(request, context)

    async def GenerateStream(self, request: GenerateRequest, context: Context) -> None:
        await self._stream(request, context)

    async def ChatStream(self, request: ChatRequest, context: Context) -> None:
        await self._stream(request, context)

    # ---------------------------------------------------------------- generation

    async def _whole(self, request: GenerateRequest | ChatRequest, context: Context) -> GenerateResponse:
        call = await self._begin(request, context)
        try:
            generation = call.generation
            news = await call.start()
            choices: dict[int, ChoiceDelta] = {}
            while news is not None:
                if not isinstance(news, Hold):
                    call.meter.text()
                    for delta in news:
                        if (whole := choices.setdefault(delta.index, delta)) is not delta:
                            whole.extend(delta)
                news = await generation.receive()
            response = GenerateResponse(
                request_id=generation.request.request_id,
                model=generation.model,
                usage=_usage(generation),
                created_unix=generation.created_unix,
            )
            for index in sorted(choices):
                _add(response, choices[index], generation.request)
            return response
        except YardError as error:
            await call.abort(error)
        finally:
            call.end()

    async def _stream(self, request: GenerateRequest | ChatRequest, context: Context) -> None:
        call = await self._begin(request, context)
        try:
            generation, asked = call.generation, call.generation.request
            news = await call.start()
            while news is not None:
                chunk = GenerateChunk(request_id=asked.request_id, model=generation.model)
                if isinstance(news, Hold):
                    chunk.held.CopyFrom(Held(reason=news.reason, estimated_wait_ms=news.estimated_wait_ms))
                else:
                    call.meter.text()
                    for delta in news:
                        _add(chunk, delta, asked)
                    if generation.done:
                        chunk.usage.CopyFrom(_usage(generation))
                await call.write(chunk)
                news = await generation.receive()
        except YardError as error:
            await call.abort(error)
        finally:
            call.end()

    async def _begin(self, request: GenerateRequest | ChatRequest, context: Context) -> GrpcCall[Generation]:
        try:
            return GrpcCall(self._path, self._metrics, "grpc", Generation(self._path, _request(request, context)), context)
        except YardError as error:
            self._metrics.requests.labels("grpc", self._metrics.route_label(request.model), error.code.value).inc()
            await abort(context, error)

    async def Embed(self, request: EmbedRequest, context: Context) -> EmbedResponse:
        if not 1 <= len(request.texts) <= MAX_TEXTS:
            await abort(context, invalid(f"texts has {len(request.texts)} entries; send 1 to {MAX_TEXTS}", "texts"))
        request_id = request.request_id or uuid.uuid4().hex
        metadata, until = headers(context), deadline(context)
        generations = [
            GenerationRequest(
                model=request.model,
                request_id=request_id,
                prompt=text,
                embed=True,
                max_tokens=1,
                deadline=until,
                traceparent=metadata.get("traceparent", ""),
                headers=metadata,
                names={"prompt": "texts", "max_tokens": "texts"},
            )
            for text in request.texts
        ]
        call = GrpcCall(self._path, self._metrics, "grpc", GenerationGroup(self._path, generations), context)
        try:
            news = await call.start()
            while news is not None:
                news = await call.generation.receive()
            call.meter.text()
            return EmbedResponse(
                request_id=request_id,
                model=call.first.model,
                embeddings=[Embedding(values=vector(generation.embedding)) for generation in call.generation.generations],
                usage=Usage(prompt_tokens=call.generation.usage.prompt_tokens),
            )
        except YardError as error:
            await call.abort(error)
        finally:
            call.end()

    # ---------------------------------------------------------------- text

    async def Tokenize(self, request: TokenizeRequest, context: Context) -> TokenizeResponse:
        async def answer() -> TokenizeResponse:
            identify(self._path.view, headers(context)).check_name(self._path.view, request.model)
            resolved = self._path.resolve(request.model)
            text = await self._path.text(resolved)
            if request.messages:
                messages = _messages(request.messages)
                check_messages(messages)
                _check_size(sum(len(message["content"]) for message in messages), "messages")
                ids = await text.encode_chat(text.render_chat(messages))
            else:
                _check_size(len(request.text), "text")
                ids = await text.encode(request.text, add_special_tokens=request.add_special_tokens)
            return await _off_the_loop(
                len(ids),
                lambda: TokenizeResponse(
                    ids=ids,
                    tokens=[text.token_bytes(token).decode("utf-8", "replace") for token in ids],
                    max_context=self._path.context(resolved, text),
                ),
            )

        return await _answered(answer(), context)

    async def Detokenize(self, request: DetokenizeRequest, context: Context) -> DetokenizeResponse:
        async def answer() -> DetokenizeResponse:
            identify(self._path.view, headers(context)).check_name(self._path.view, request.model)
            text = await self._path.text(self._path.resolve(request.model))
            _check_size(len(request.ids), "ids")
            check_ids(request.ids, text.vocabulary_size, "ids")
            return await _off_the_loop(
                len(request.ids),
                lambda: DetokenizeResponse(text=text.decode(request.ids, skip_special_tokens=request.skip_special_tokens)),
            )

        return await _answered(answer(), context)

    async def ListModels(self, request: ListModelsRequest, context: Context) -> ListModelsResponse:
        try:
            caller = identify(self._path.view, headers(context))
        except YardError as error:
            await abort(context, error)
        return ListModelsResponse(
            models=[
                self._info(route)
                for route in route_table.names(self._path.view)
                if any(caller.may_ask(name, route.name) for name in (route.name, *route.aliases))
            ]
        )

    def _info(self, route: route_table.RouteEntry) -> ModelInfo:
        models = [model for model, weight in route.targets if weight > 0 and model in self._path.view.models]
        contexts = [context for model in models if (context := self._path.known_context(model))]
        return ModelInfo(
            name=route.name,
            kind="model" if route.implicit else "route",
            ready=any(self._path.ready(model) for model in models),
            max_context=min(contexts, default=0),
            targets=[] if route.implicit else [model for model, _ in route.targets],
        )


def _check_size(size: int, name: str) -> None:
    if size > MAX_TEXT:
        unit = "ids" if name == "ids" else "characters"
        raise invalid(f"{name} has {size} {unit}; at most {MAX_TEXT} are taken in one request, so send it in parts", name)


async def _off_the_loop(size: int, work: Callable[[], T]) -> T:
    """What takes time for each token is done on a thread where there are many."""
    return work() if size <= INLINE_TOKENS else await asyncio.to_thread(work)


async def _answered(answer: Awaitable[T], context: Context) -> T:
    try:
        async with asyncio.timeout(context.time_remaining()):
            return await answer
    except TimeoutError:
        await abort(context, YardError(ErrorCode.DEADLINE, "the deadline passed while the tokenizer was being loaded"))
    except YardError as error:
        await abort(context, error)


def _request(request: GenerateRequest | ChatRequest, context: Context) -> GenerationRequest:
    metadata = headers(context)
    sampling = request.sampling
    result = GenerationRequest(
        model=request.model,
        request_id=request.request_id or uuid.uuid4().hex,
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        sampling=Sampling(**{name: getattr(sampling, name) for name in _SAMPLING_FIELDS if sampling.HasField(name)}),
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        n=request.n or 1,
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        return_token_ids=request.return_token_ids,
        json_schema=request.json_schema,
        deadline=deadline(context),
        traceparent=metadata.get("traceparent", ""),
        headers=metadata,
    )
    if isinstance(request, ChatRequest):
        result.messages = _messages(request.messages)
    elif request.WhichOneof("input") == "prompt_ids":
        result.prompt_ids = request.prompt_ids.ids
    elif request.WhichOneof("input") == "prompt":
        result.prompt = request.prompt
    return result


def _messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    if len(messages) > MAX_MESSAGES:
        raise too_many(messages, MAX_MESSAGES, "messages")
    return [{"role": message.role, "content": message.content} for message in messages]


def _add(answer: GenerateChunk | GenerateResponse, delta: ChoiceDelta, request: GenerationRequest) -> None:
    """In place: what each token of a stream goes through. A message made first and copied takes twice as long."""
    choice = answer.choices.add(index=delta.index, text=delta.text)
    if delta.finish_reason:
        choice.finish_reason, choice.stop_reason = _FINISH[delta.finish_reason], delta.stop_reason
    if request.return_token_ids:
        choice.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        choice.logprobs.extend(map(_logprob, delta.logprobs))


def _logprob(logprob: TokenLogprob) -> TokenLogprobMessage:
    return TokenLogprobMessage(
        token_id=logprob.token_id,
        text=logprob.raw.decode("utf-8", "replace"),
        raw=logprob.raw,
        logprob=logprob.logprob,
        alternatives=map(_logprob, logprob.alternatives),
    )


def _usage(generation: Generation) -> Usage:
    usage = generation.usage
    return Usage(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens, cached_tokens=usage.cached_tokens)
