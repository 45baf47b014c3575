"""POST of OpenAI's generating endpoints: the life of one generation under one HTTP exchange."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway.api.errors import ErrorCode, YardError, invalid, shortened
from gateway.api.proto.pool_pb2 import Hold
from gateway.servers.choice_stream import ChoiceDelta
from gateway.servers.generation import Generation
from gateway.servers.generation_group import GenerationGroup
from gateway.servers.generation_path import GenerationPath
from gateway.servers.http_reply import Reply, event
from gateway.servers.metrics import GatewayMetrics, RequestMeter
from gateway.servers.openai_format import ChatFormat, CompletionFormat, usage_body
from gateway.servers.openai_request import ApiRequest, parse_body

TIMEOUT_HEADER = "x-modelyard-timeout-ms"
MAX_TIMEOUT_DIGITS = 15
MAX_BODY_BYTES = 8 * 2**20
"""A million token ids as JSON. Reading it holds up everybody else for some tens of milliseconds, so it is not more."""
Parse = Callable[[dict[str, Any], str, float | None, str], ApiRequest]


class GenerationEndpoint:
    """POST of one generating endpoint, as plain ASGI: it must see the client leave whatever it is doing."""

    def __init__(self, path: GenerationPath, metrics: GatewayMetrics, parse: Parse) -> None:
        self._path = path
        self._metrics = metrics
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id") or uuid.uuid4().hex
        reply = Reply(send, request_id, self._path)
        try:
            body = parse_body(await _read_body(receive))
            request = self._parse(body, request_id, _deadline(headers), headers.get("traceparent", ""))
            plain = dict(headers)
            for generation in request.generations:
                generation.headers = plain
        except YardError as error:
            self._metrics.requests.labels("http", self._route_of(locals().get("body")), error.code.value).inc()
            await reply.error(error)
            return
        except _ClientLeft:
            return
        await self._answer(request, receive, reply)

    def _route_of(self, body: Any) -> str:
        name = body.get("model") if isinstance(body, dict) else None
        return self._metrics.route_label(name if isinstance(name, str) else "")

    async def _answer(self, request: ApiRequest, receive: Receive, reply: Reply) -> None:
        meter = RequestMeter(self._metrics, "http", request.model)
        group = GenerationGroup(self._path, request.generations)
        watcher = asyncio.create_task(_close_when_left(receive, group), name="client-watch")
        failure: YardError | None = YardError(ErrorCode.CANCELLED, "the client left")
        try:
            await group.start()
            news = await group.receive()  # before the headers, so that a refusal by the pool is a status of its own
            reply.answered_by(group.first)
            if request.stream:
                await self._stream(request, group, news, meter, reply)
            else:
                await self._whole(request, group, news, meter, reply)
            failure = None if group.done else failure
        except YardError as error:
            failure = error
            await reply.error(error)
        finally:
            watcher.cancel()
            group.close()
            meter.end(
                group.first.model, group.usage.prompt_tokens, group.tokens, failure, cached_tokens=group.usage.cached_tokens
            )

    async def _whole(self, request: ApiRequest, group: GenerationGroup, news: Any, meter: RequestMeter, reply: Reply) -> None:
        choices: dict[int, ChoiceDelta] = {}
        while news is not None:
            if not isinstance(news, Hold):
                meter.text()
                for delta in _read(request, news):
                    if (whole := choices.setdefault(delta.index, delta)) is not delta:
                        whole.extend(delta)
            news = await group.receive()
        shape = _format(request)
        wants_logprobs = request.generations[0].logprobs is not None
        bodies = []
        for index in sorted(choices):
            delta = choices[index]
            body = shape.whole(delta, wants_logprobs)
            if request.echo:
                body["text"] = await self._echo(request, group, index) + body["text"]
            bodies.append(body)
        head = _head(request, group.first, shape.object)
        await reply.json({**head, "choices": bodies, "usage": usage_body(group.usage)})

    async def _stream(self, request: ApiRequest, group: GenerationGroup, news: Any, meter: RequestMeter, reply: Reply) -> None:
        shape = _format(request)
        head = _head(request, group.first, shape.chunk_object)
        if request.include_usage:
            head["usage"] = None
        echoed = set() if request.echo else None
        await reply.begin_stream()
        while news is not None:
            if isinstance(news, Hold):
                await reply.events(f": held, about {news.estimated_wait_ms} ms: {news.reason}\n\n".encode())
            else:
                meter.text()
                events = []
                for delta in _read(request, news):
                    if echoed is not None and delta.index not in echoed:
                        echoed.add(delta.index)
                        delta.text = await self._echo(request, group, delta.index) + delta.text
                    chunk = {**head, "choices": [shape.chunk(delta)]}
                    if request.continuous_usage:
                        chunk["usage"] = usage_body(group.usage)
                    events.append(event(chunk))
                if events:
                    await reply.events(b"".join(events))
            news = await group.receive()
        last = event({**head, "choices": [], "usage": usage_body(group.usage)}) if request.include_usage else b""
        await reply.events(last + b"data: [DONE]\n\n", more=False)

    async def _echo(self, request: ApiRequest, group: GenerationGroup, index: int) -> str:
        prompt = request.prompts[index // request.generations[0].n]
        if isinstance(prompt, str):
            return prompt
        resolved = group.first.resolved
        assert resolved is not None
        text = await self._path.text(resolved)
        return text.decode(prompt, skip_special_tokens=True)


class _ClientLeft(Exception):
    """The connection closed before the whole body was there."""


async def _read_body(receive: Receive) -> bytes:
    parts = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientLeft
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise invalid(f"the body is larger than {MAX_BODY_BYTES} bytes; send fewer prompts in one request, or use gRPC")
        if not message.get("more_body", False):
            return b"".join(parts)


async def _close_when_left(receive: Receive, group: GenerationGroup) -> None:
    """rule 10: what runs is cancelled at once, also before the first token and for answers that are not streamed."""
    while (await receive())["type"] != "http.disconnect":
        pass
    group.close()


def _deadline(headers: Headers) -> float | None:
    value = headers.get(TIMEOUT_HEADER)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= MAX_TIMEOUT_DIGITS):
        raise invalid(
            f"{TIMEOUT_HEADER} must be a whole number of milliseconds of at most {MAX_TIMEOUT_DIGITS} digits, "
            f"not {shortened(value, 40)!r}",
            TIMEOUT_HEADER,
        )
    return asyncio.get_running_loop().time() + int(value) / 1000


def _read(request: ApiRequest, news: list[ChoiceDelta]) -> list[ChoiceDelta]:
    return request.tools.read(news) if request.tools is not None else news


def _format(request: ApiRequest) -> ChatFormat | CompletionFormat:
    return ChatFormat() if request.chat else CompletionFormat()


def _head(request: ApiRequest, generation: Generation, kind: str) -> dict[str, Any]:
    prefix = ChatFormat.id_prefix if request.chat else CompletionFormat.id_prefix
    return {
        "id": prefix + request.request_id,
        "object": kind,
        "created": generation.created_unix,
        "model": generation.model,
        "system_fingerprint": f"{generation.model}-{generation.resolved.entry.generation}" if generation.resolved else None,
    }
