"""TLS among the processes of a site: over real connections, with certificates that nobody handed out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from lone_gateway import LoneGateway
from scripted_pool import SECRET, ScriptedPool

from gateway.api.config import SiteSpec
from gateway.api.pool_channel import TLS_SCHEME, pool_channel
from gateway.api.proto.inference_pb2 import GenerateRequest
from gateway.api.proto.pool_pb2 import DescribePoolRequest
from gateway.api.proto.pool_pb2_grpc import PoolControlStub, add_PoolControlServicer_to_server
from gateway.api.records import PoolRecord
from gateway.api.runtime import SECRET_METADATA_KEY, Runtime
from gateway.api.site_tls import LIFE_S, NAME, SiteTls
from gateway.controller.site_effects import SiteEffects
from gateway.site.site_files import SiteFiles
from gateway.state.store import SiteStore
from workers.driver.server import PoolControlService, PoolServer

RECORD = PoolRecord("p", "", "1", "here", 1, "cpu", 1, 1, 0.0)


class Loop:
    """Of a driver: all that a controller's call needs."""

    def __init__(self) -> None:
        self.fences: list[int] = []
        self.core = SimpleNamespace(state=SimpleNamespace(fence=7))

    def assign(self, fence: int, revision: int, wanted: list) -> None:
        self.fences.append(fence)


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
async def driver(tmp_path: Path, loop: Loop) -> AsyncIterator[PoolServer]:
    server = PoolServer(cast("Any", loop), lambda: RECORD, SECRET, "127.0.0.1", tmp_path / "port", tls=True)
    await server.start()
    yield server
    await server.stop(0)


async def ask(channel: grpc.aio.Channel) -> str:
    """The code of a call that carries the site's secret."""
    async with channel:
        try:
            await PoolControlStub(channel).Describe(DescribePoolRequest(), timeout=5, metadata=((SECRET_METADATA_KEY, SECRET),))
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


async def test_only_who_knows_the_secret_comes_in(driver: PoolServer) -> None:
    """Rule 15: others do not get as far as a call, whatever they send in it."""
    assert driver.endpoint.startswith(TLS_SCHEME)
    assert await ask(pool_channel(driver.endpoint, SECRET)) == "OK"
    address = driver.endpoint.removeprefix(TLS_SCHEME)
    stranger = [("grpc.ssl_target_name_override", NAME)]
    anonymous = grpc.ssl_channel_credentials(SiteTls(SECRET)._authority)
    assert await ask(pool_channel(driver.endpoint, SECRET + "!")) == "UNAVAILABLE"
    assert await ask(grpc.aio.secure_channel(address, anonymous, options=stranger)) == "UNAVAILABLE"
    assert await ask(grpc.aio.insecure_channel(address)) == "UNAVAILABLE"


async def test_a_controller_assigns_over_it(driver: PoolServer, loop: Loop, tmp_path: Path) -> None:
    runtime = Runtime("s", "", SECRET, str(tmp_path), str(tmp_path), "node", internal_tls=True)
    store = SiteStore("redis://127.0.0.1:1", "s")  # not asked for this
    effects = SiteEffects(runtime, store, cast("Any", None), "a controller")
    try:
        await effects.assign(driver.endpoint, 7, 1, ())
    finally:
        await effects.close()
        await store.close()
    assert loop.fences == [7]


async def test_certificates_are_made_anew_before_they_end() -> None:
    """The same server, and the same client, whose certificates had ended, are believed again once their clocks are right."""
    clocks = {"server": -2 * LIFE_S, "client": -2 * LIFE_S}

    def clock(of: str) -> Callable[[], float]:
        return lambda: time.time() + clocks[of]

    tls, client = SiteTls(SECRET, clock("server")), SiteTls(SECRET, clock("client"))
    server = grpc.aio.server()
    add_PoolControlServicer_to_server(PoolControlService(cast("Any", None), lambda: RECORD), server)
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials())
    await server.start()

    def channel() -> grpc.aio.Channel:
        options = [("grpc.ssl_target_name_override", NAME), ("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.secure_channel(f"127.0.0.1:{port}", client.channel_credentials(), options=options)

    try:
        assert await ask(channel()) == "UNAVAILABLE"
        clocks["server"] = 0
        assert await ask(channel()) == "UNAVAILABLE"
        clocks["client"] = 0
        assert await ask(channel()) == "OK"
        made = client._current()
        assert client._current() == made
        clocks["client"] = LIFE_S / 2
        assert client._current() != made
    finally:
        await server.stop(None)


async def test_a_request_goes_over_tls(byte_level: Path, tmp_path: Path) -> None:
    pool = ScriptedPool(tls=SiteTls(SECRET))
    pool.script = lambda sequence: sequence.end("length", tokens=[5])
    lone = LoneGateway(tmp_path, {"m": byte_level})
    try:
        await lone.start(pool)
        answer = await lone.inference.Generate(GenerateRequest(model="m", prompt="hello", max_tokens=1), timeout=5)
        assert answer.usage.completion_tokens == 1
    finally:
        await lone.stop()
        await pool.stop()


def test_a_site_beyond_loopback_has_it_unless_it_says_otherwise() -> None:
    def has(host: str, asked: bool | None) -> bool:
        spec = SiteSpec.model_validate({"listen": {"host": host}, "internal_tls": asked})
        return SiteFiles(Path(), "s", spec, ()).has_internal_tls

    assert [has(host, None) for host in ("127.0.0.1", "0.0.0.0")] == [False, True]
    assert [has("127.0.0.1", True), has("0.0.0.0", False)] == [True, False]
