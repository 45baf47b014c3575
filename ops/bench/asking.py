"""The load that `ops.bench.gateway` puts on whatever answers: whole answers at random times, and 64 streams.

It computes as little as it can while it measures: what is read is kept with its time, and looked at afterwards.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import grpc
import psutil

from gateway.api.grpc_options import CLIENT_OPTIONS
from gateway.api.proto.inference_pb2 import GenerateChunk, GenerateRequest
from ops.bench.scripted_engine import LETTER, MODEL, EngineProcess

STREAMS = 64
WHOLE_TOKENS = 16
ENDLESS_TOKENS = 4000
SETTLE_S = 0.5
CALLERS = 32
"""Who ask one after the other, to find out how much can be asked."""
OFFERED_PER_S = 20_000
"""Tokens, to find out how many can be carried; more than anything here can."""

_ids = (f"request-{number}" for number in itertools.count())
_SERVICE = "/modelyard.v1.Inference/"
_METADATA = (("application", "forwarder"),)  # for Serve's proxy, which has to choose; nobody else looks at it


class Target(Protocol):
    async def whole(self, request: str) -> None: ...

    def stream(self, request: str) -> AsyncIterator[bytes]: ...

    def tokens(self, raw: bytes) -> int: ...

    async def close(self) -> None: ...


class GrpcTarget:
    """modelyard.v1.Inference, whoever serves it."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        self._whole = self._channel.unary_unary(f"{_SERVICE}Generate")
        self._stream = self._channel.unary_stream(f"{_SERVICE}GenerateStream")

    async def whole(self, request: str) -> None:
        await self._whole(_request(request, WHOLE_TOKENS), timeout=30, metadata=_METADATA)

    async def stream(self, request: str) -> AsyncIterator[bytes]:
        call = self._stream(_request(request, ENDLESS_TOKENS), timeout=120, metadata=_METADATA)
        try:
            async for raw in call:
                yield raw
        finally:
            call.cancel()

    def tokens(self, raw: bytes) -> int:
        return sum(len(choice.text) for choice in GenerateChunk.FromString(raw).choices)

    async def close(self) -> None:
        await self._channel.close()


def _request(request: str, tokens: int) -> bytes:
    return GenerateRequest(model=MODEL, prompt=request, max_tokens=tokens, request_id=request).SerializeToString()


class HttpTarget:
    """OpenAI's chat completions, whoever serves them."""

    def __init__(self, url: str) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._url = f"{url}/v1/chat/completions"

    async def whole(self, request: str) -> None:
        async with self._session.post(
            self._url, json=_body(request, WHOLE_TOKENS), headers={"x-request-id": request}
        ) as response:
            raw = await response.read()
            if response.status != 200:
                raise RuntimeError(f"{self._url}: {response.status} {raw[:300]!r}")

    async def stream(self, request: str) -> AsyncIterator[bytes]:
        body, headers = {**_body(request, ENDLESS_TOKENS), "stream": True}, {"x-request-id": request}
        async with self._session.post(self._url, json=body, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(f"{self._url}: {response.status} {(await response.read())[:300]!r}")
            async for raw in response.content:
                if raw.startswith(b"data: {"):
                    yield raw

    def tokens(self, raw: bytes) -> int:
        choices = json.loads(raw[6:])["choices"]
        return sum((choice["delta"].get("content") or "").count(LETTER) for choice in choices)

    async def close(self) -> None:
        await self._session.close()


def _body(request: str, tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": request}], "max_tokens": tokens}


@dataclass
class Measured:
    """Of one way or of several of the same sort: what each answer or token took, and the CPU of the processes on the way."""

    latencies_s: list[float] = field(default_factory=list)
    count: int = 0
    messages: int = 0
    took_s: float = 0.0
    cpu_s: float = 0.0

    def add(self, other: Measured) -> None:
        self.latencies_s += other.latencies_s
        self.count += other.count
        self.messages += other.messages
        self.took_s += other.took_s
        self.cpu_s += other.cpu_s

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(self.latencies_s)
        return ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1000

    @property
    def per_s(self) -> float:
        return self.count / self.took_s

    @property
    def cpu_us(self) -> float:
        """For each answer or token."""
        return self.cpu_s / self.count * 1e6


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without our own garbage collection."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _cpu_s(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


async def whole_closed(target: Target, seconds: float) -> Measured:
    """Answers asked for one after the other by CALLERS: how many there can be."""
    result = Measured()
    end = time.monotonic() + seconds

    async def caller() -> None:
        while time.monotonic() < end:
            await target.whole(next(_ids))
            result.count += 1

    began = time.monotonic()
    with _undisturbed():
        await asyncio.gather(*(caller() for _ in range(CALLERS)))
    result.took_s = time.monotonic() - began
    return result


async def whole_open(target: Target, rate: float, seconds: float, processes: list[psutil.Process], seed: int) -> Measured:
    """Answers asked for at random times (Poisson), whatever becomes of those before."""
    rng = random.Random(seed)
    result = Measured()
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []

    async def ask() -> None:
        began = time.monotonic()
        await target.whole(next(_ids))
        result.latencies_s.append(time.monotonic() - began)

    with _undisturbed():
        cpu_s, began = _cpu_s(processes), loop.time()
        due = began
        while due < began + seconds:
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - loop.time()))
            tasks.append(asyncio.create_task(ask()))
        await asyncio.gather(*tasks)
        result.cpu_s, result.took_s = _cpu_s(processes) - cpu_s, loop.time() - began
    result.count = len(tasks)
    return result


async def streams(
    target: Target, engine: EngineProcess, step_s: float, seconds: float, processes: list[psutil.Process]
) -> Measured:
    """STREAMS streams with a token each a step, looked at for so long once all of them run: from when the engine gave a token out
    until it was read here."""
    read: dict[str, list[tuple[float, bytes]]] = {next(_ids): [] for _ in range(STREAMS)}

    async def reader(request: str, into: list[tuple[float, bytes]]) -> None:
        async for raw in target.stream(request):
            into.append((time.monotonic(), raw))

    await engine.pace(step_s)
    with _undisturbed():
        tasks = [asyncio.create_task(reader(prompt, into)) for prompt, into in read.items()]
        try:
            while not all(read.values()):
                await asyncio.sleep(0.05)
                for task in tasks:
                    if task.done():
                        task.result()
            await asyncio.sleep(SETTLE_S)
            cpu_s, began = _cpu_s(processes), time.monotonic()
            await asyncio.sleep(seconds)
            cpu_s, ended = _cpu_s(processes) - cpu_s, time.monotonic()
        finally:
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)
    given = await engine.pace(0.0)
    result = Measured(took_s=ended - began, cpu_s=cpu_s)
    for request, arrivals in read.items():
        _count(result, target, given[request], arrivals, began, ended)
    return result


def _count(
    result: Measured, target: Target, given: list[float], arrivals: list[tuple[float, bytes]], began: float, ended: float
) -> None:
    place = 0
    for at, raw in arrivals:
        tokens = target.tokens(raw)
        if began <= at < ended:
            result.messages += 1
            result.count += tokens
            result.latencies_s += [at - out for out in given[place : place + tokens]]
        place += tokens
