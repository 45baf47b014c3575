"""The HTTP protocol of a gateway, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from gateway.servers import ports
from gateway.servers.http_protocol import bounded_http

REQUEST_S = 0.6
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"


async def echo(request: Request) -> PlainTextResponse:
    body = await request.body()
    if body == b"later":
        await asyncio.sleep(3 * REQUEST_S)
    return PlainTextResponse(body)


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    listener = ports.shared_socket("127.0.0.1", 0)
    config = uvicorn.Config(
        Starlette(routes=[Route("/", echo, methods=["POST"])]),
        http=bounded_http(1000, REQUEST_S),  # type: ignore[arg-type]
        lifespan="off",
        log_config=None,
        timeout_keep_alive=5,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    yield reader, writer
    writer.close()
    server.should_exit = True
    await serving


@pytest.mark.parametrize("sent", [b"", b"POST / HT", HEAD], ids=["nothing", "line", "half a head"])
async def test_who_never_ends_a_request_holds_no_connection(sent: bytes) -> None:
    """Rule 9."""
    async with connected() as (reader, writer):
        writer.write(sent)
        async with asyncio.timeout(5):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"has not come whole in 0.6 s" in answer


async def test_a_body_that_drips_is_not_waited_for() -> None:
    async with connected() as (reader, writer):
        writer.write(HEAD + b"\r\nab")
        began = asyncio.get_running_loop().time()
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        assert asyncio.get_running_loop().time() - began >= REQUEST_S * 0.9


async def test_requests_in_time_share_a_connection_longer_than_that() -> None:
    async with connected() as (reader, writer):
        for _ in range(4):
            writer.write(HEAD + b"\r\n")
            await asyncio.sleep(REQUEST_S / 2)
            writer.write(b"whole")
            async with asyncio.timeout(5):
                assert (await reader.readuntil(b"whole")).startswith(b"HTTP/1.1 200 ")


async def test_a_request_that_waits_for_the_answer_before_it_is_not_late() -> None:
    async with connected() as (reader, writer):
        writer.write(HEAD + b"\r\nlater" + HEAD + b"\r\nwh")
        async with asyncio.timeout(5):
            assert (await reader.readuntil(b"later")).startswith(b"HTTP/1.1 200 ")
            writer.write(b"ole")
            assert (await reader.readuntil(b"whole")).startswith(b"HTTP/1.1 200 ")
