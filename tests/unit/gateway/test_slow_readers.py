"""Clients that ask and do not read: what they hold of the pools is given back, and so is the memory of what waits for them."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import grpc
import pytest
from lone_gateway import LoneGateway, ids_of, until
from scripted_pool import ScriptedPool, SubmittedSequence

from gateway.api.grpc_options import CLIENT_OPTIONS
from gateway.api.proto import inference_pb2 as pb
from gateway.api.proto.inference_pb2_grpc import InferenceStub
from gateway.servers import slow_reader

# Without the probe that grows it, the window of a call stays at 64 KiB.
SMALL_WINDOW = [*CLIENT_OPTIONS, ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536)]
LONG = 100_000


async def http_stream(lone: LoneGateway) -> socket.socket:
    """A connection that has asked for a stream and takes hardly anything of it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", lone.servers.http_port))
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 9, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    await loop.sock_sendall(client, head + body)
    return client


async def answer_on_and_on(sequence: SubmittedSequence, ids: list[int]) -> None:
    """Until it is cancelled."""
    async with asyncio.timeout(10):
        while not sequence.cancelled.is_set():
            sequence.tokens(ids)
            await asyncio.sleep(0.05)


async def test_who_does_not_read_holds_no_place(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    """Its place in the pool is free when the pool has said all its ends, not when the client has read them."""
    ids = ids_of(byte_level, "yes")
    client = await http_stream(lone)
    sequence = await pool.next()
    gate = lone.path.gate._models["m"]
    assert gate.inside == 1
    sequence.tokens(ids * LONG)
    sequence.tokens(ids)
    sequence.end("length")
    await until(lambda: gate.inside == 0)
    assert lone.links.in_flight == 0
    client.close()


async def test_a_stream_over_http_that_nobody_reads_ends(
    lone: LoneGateway, pool: ScriptedPool, byte_level: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_reader, "WRITE_S", 0.2)
    client = await http_stream(lone)
    await answer_on_and_on(await pool.next(), ids_of(byte_level, "yes") * LONG)
    await until(lambda: lone.metrics.requests.labels("http", "m", "cancelled")._value.get() == 1)
    client.close()


async def test_a_stream_over_grpc_that_nobody_reads_ends(
    lone: LoneGateway, pool: ScriptedPool, byte_level: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_reader, "WRITE_S", 0.2)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{lone.servers.grpc_port}", options=SMALL_WINDOW) as channel:
        stream = InferenceStub(channel).GenerateStream(pb.GenerateRequest(model="m", prompt="x", max_tokens=9))
        await answer_on_and_on(await pool.next(), ids_of(byte_level, "yes") * LONG)
        await until(lambda: lone.metrics.requests.labels("grpc", "m", "cancelled")._value.get() == 1)
        stream.cancel()


async def test_only_a_write_that_takes_long_ends_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not many short ones, though one timer stands for all."""
    monkeypatch.setattr(slow_reader, "WRITE_S", 0.5)
    written: list[int] = []

    async def stream() -> None:
        watch = slow_reader.WriteWatch()
        try:
            for number in range(6):
                watch.begins()
                await asyncio.sleep(0.1)
                watch.ends()
                written.append(number)
            watch.begins()
            await asyncio.Event().wait()
        finally:
            assert watch.gave_up
            watch.close()

    task = asyncio.create_task(stream())
    async with asyncio.timeout(10):
        await asyncio.wait([task])
    assert task.cancelled()
    assert written == list(range(6))
