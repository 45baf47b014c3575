"""A stand-in for `trtllm-serve` on a real socket: its OpenAI endpoints, as strict about fields, doing what a test says."""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

_COMMON = {
    *("model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n"),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty", "user"),
}
_FIELDS = {"chat": _COMMON | {"messages", "tools"}, "text": _COMMON | {"prompt", "add_special_tokens"}}


@dataclass
class Asked:
    """One request as it came. `cancelled` is set when its client goes before the end."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class TrtllmServe:
    """Answers with `pieces`, one event each. `hold_after`: pieces after which it waits for `go_on`."""

    def __init__(self, name: str = "llama-70b", *, tls: ssl.SSLContext | None = None, key: str = "") -> None:
        self.name = name
        self.pieces = ["Par", "is", "."]
        self.finish: tuple[str, str | int | None] = ("stop", None)
        self.refusal: tuple[int, dict[str, Any], dict[str, str]] | None = None
        self.break_off = False
        self.reasons = 0  # events of reasoning before the text, a tenth of a second each
        self.hold_after: int | None = None
        self.go_on = asyncio.Event()
        self.asked: asyncio.Queue[Asked] = asyncio.Queue()
        self.port = 0
        self._tls = tls
        self._key = key
        self._runner: web.AppRunner | None = None

    @property
    def source(self) -> str:
        return f"openai+http{'s' if self._tls else ''}://localhost:{self.port}/v1#{self.name}"

    async def start(self) -> TrtllmServe:
        """Also after `stop`, on the same port."""
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._tls).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def next(self) -> Asked:
        async with asyncio.timeout(10):
            return await self.asked.get()

    def _denied(self, request: web.Request) -> web.Response | None:
        if self._key and request.headers.get("authorization") != f"Bearer {self._key}":
            return web.json_response({"object": "error", "message": "wrong key", "code": 401}, status=401)
        return None

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.name, "object": "model", "owned_by": "tensorrt_llm"}
        return self._denied(request) or web.json_response({"object": "list", "data": [card]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "chat")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "text")

    async def _answer(self, request: web.Request, kind: str) -> web.StreamResponse:
        if (denied := self._denied(request)) is not None:
            return denied
        asked = Asked(request.path, await request.json(), {name.lower(): value for name, value in request.headers.items()})
        self.asked.put_nowait(asked)
        if unknown := asked.body.keys() - _FIELDS[kind]:
            detail = {"object": "error", "message": f"Extra inputs are not permitted: {sorted(unknown)}", "code": 400}
            return web.json_response(detail, status=400)
        if self.refusal is not None:
            status, body, headers = self.refusal
            return web.json_response(body, status=status, headers=headers)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._stream(response, kind, asked.body)
        except asyncio.CancelledError:
            asked.cancelled.set()
            raise
        return response

    async def _stream(self, response: web.StreamResponse, kind: str, body: dict[str, Any]) -> None:
        async def send(choices: list[dict[str, Any]], **more: Any) -> None:
            event = {"id": "x", "object": "chunk", "model": self.name, "choices": choices, **more}
            await response.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")

        def choice(text: str, reason: str | None = None, stop: str | int | None = None) -> dict[str, Any]:
            said = {"delta": {"content": text}} if kind == "chat" else {"text": text}
            return {"index": 0, **said, "finish_reason": reason, "stop_reason": stop}

        if kind == "chat":
            await send([{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}])
        for _ in range(self.reasons):
            await asyncio.sleep(0.1)
            await send([{"index": 0, "delta": {"reasoning_content": "hm "}, "finish_reason": None}])
        pieces = self.pieces[: body.get("max_tokens", len(self.pieces))]
        for count, piece in enumerate(pieces):
            if self.hold_after == count:
                await self.go_on.wait()
            await send([choice(piece)])
        if self.break_off:
            return
        reason, stop = self.finish if len(pieces) == len(self.pieces) else ("length", None)
        await send([choice("", reason, stop)])
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": 11, "completion_tokens": len(pieces) + 1, "prompt_tokens_details": {"cached_tokens": 4}}
            await send([], usage=usage)
        await response.write(b"data: [DONE]\n\n")
