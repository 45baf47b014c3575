"""What goes back on one HTTP exchange: JSON, a stream of server-sent events, or an error as either."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
from starlette.types import Send

from gateway.api.errors import ErrorCode, YardError
from gateway.servers import slow_reader
from gateway.servers.generation import Generation
from gateway.servers.generation_path import GenerationPath
from gateway.servers.openai_format import error_body

_JSON = (b"content-type", b"application/json")
_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Reply:
    """What is sent on one HTTP exchange, in the order that ASGI wants it."""

    def __init__(self, send: Send, request_id: str, path: GenerationPath) -> None:
        self._send = send
        self._path = path
        self._writes = slow_reader.WriteWatch()
        self._begun = False
        self._headers = [(b"x-request-id", request_id.encode("latin-1", "replace"))]

    def answered_by(self, generation: Generation) -> None:
        resolved = generation.resolved
        assert resolved is not None
        self._headers += [
            (b"x-modelyard-model", resolved.model.encode()),
            (b"x-modelyard-route", resolved.route.encode()),
            (b"x-modelyard-route-generation", str(resolved.route_generation).encode()),
        ]

    async def json(self, body: dict[str, Any], status: int = 200) -> None:
        raw = msgspec.json.encode(body)
        await self._start(status, [_JSON, (b"content-length", str(len(raw)).encode())])
        await self._write(raw, more=False)

    async def begin_stream(self) -> None:
        await self._start(200, _SSE)

    async def events(self, raw: bytes, *, more: bool = True) -> None:
        await self._write(raw, more=more)

    async def error(self, error: YardError) -> None:
        """As a status, or inside a stream that has begun as an event, which OpenAI's clients raise. [DONE] does not follow it."""
        if error.code is ErrorCode.CANCELLED and self._begun:
            return
        if self._begun:
            await self.events(event(error_body(error)), more=False)
            return
        self._headers += retry_after(error)
        await self.json(error_body(error), error.http_status)

    async def _write(self, raw: bytes, *, more: bool) -> None:
        """YardError(CANCELLED) when the client does not read; the connection is closed then."""
        watch = self._writes
        watch.begins()
        try:
            await self._send({"type": "http.response.body", "body": raw, "more_body": more})
        except asyncio.CancelledError as error:
            if not watch.gave_up or (task := asyncio.current_task()) is None:
                raise
            task.uncancel()
            raise slow_reader.gave_up() from error
        finally:
            watch.ends()
            if not more:
                watch.close()

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._begun = True
        if self._path.view.degraded:
            self._headers.append((b"x-modelyard-degraded", b"true"))
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self._headers]})


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def retry_after(error: YardError) -> list[tuple[bytes, bytes]]:
    if error.retry_after_s is None:
        return []
    return [
        (b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()),
        (b"retry-after-ms", str(int(error.retry_after_s * 1000)).encode()),
    ]
