"""The whole Gateway over a real Valkey: its ports, its life, and what happens to both when something else goes."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import httpx
import msgspec
import pytest
from free_port import free_port
from lone_gateway import ids_of
from redis.asyncio import Redis
from scripted_pool import SECRET, ScriptedPool
from valkey_server import ValkeyServer

from gateway.api.errors import ErrorCode, YardError
from gateway.api.grpc_options import RETRY_OPTION
from gateway.api.proto import admin_pb2, inference_pb2
from gateway.api.proto.admin_pb2_grpc import AdminStub
from gateway.api.proto.inference_pb2_grpc import InferenceStub
from gateway.api.proto.kserve_pb2 import RepositoryModelUnloadRequest
from gateway.api.proto.kserve_pb2_grpc import GRPCInferenceServiceStub
from gateway.api.records import GatewayRecord, Keys
from gateway.api.runtime import SECRET_METADATA_KEY, Runtime
from gateway.api.tasks import cancelled
from gateway.servers.gateway import Gateway
from gateway.servers.ports import claimed_ports
from gateway.state.connection import LOST
from gateway.text.model_text import ModelText

# Listens on a port as others do; "sharing" and "grpc" as a gateway of another site would, whom the kernel would let us join.
FOREIGN = """
import asyncio, socket, sys
async def serve(port, how):
    if how == "grpc":
        import grpc
        server = grpc.aio.server(options=[("grpc.so_reuseport", 1)])
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
    else:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, how == "sharing")
        listener.bind(("127.0.0.1", port))
        listener.listen()
    print("ready", flush=True)
    sys.stdin.read()
asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))
"""

Make = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def make(own_valkey: ValkeyServer, tmp_path: Path, byte_level: Path, site: str) -> AsyncIterator[Make]:
    """Starts gateways of one site; stops them in the end."""
    running: list[Gateway] = []

    async def start(bind_host: str = "127.0.0.1", grpc_port: int = 0, http_port: int = 0) -> Gateway:
        runtime = Runtime(
            site=site,
            redis_url=own_valkey.url,
            secret=SECRET,
            cache_dir=str(tmp_path / "cache"),
            run_dir=str(tmp_path / "run"),
            bind_host=bind_host,
            grpc_port=grpc_port,
            http_port=http_port,
        )
        gateway = Gateway(runtime, load_text=lambda model, _: ModelText(model, byte_level, eos_ids=(2,), max_context=256))
        await gateway.start()
        running.append(gateway)
        return gateway

    yield start
    for gateway in running:
        await gateway.stop(0.0)


@pytest.fixture
async def pool() -> AsyncIterator[ScriptedPool]:
    pool = ScriptedPool("a", ["m"])
    await pool.start()
    yield pool
    await pool.stop()


class Heartbeat:
    """What a pool driver does towards Redis."""

    def __init__(self, valkey: ValkeyServer, site: str, pool: ScriptedPool) -> None:
        self._url, self._keys, self._pool = valkey.url, Keys(site), pool

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._beat())

    async def __aexit__(self, *_: object) -> None:
        await cancelled([self._task])

    async def _beat(self) -> None:
        async with Redis.from_url(self._url) as redis:
            while True:
                try:
                    await redis.set(self._keys.pool(self._pool.name), msgspec.json.encode(self._pool.record()), px=5000)
                    await redis.sadd(self._keys.pools, self._pool.name)
                    await redis.publish(self._keys.observed, f"pool:{self._pool.name}")
                except LOST:
                    pass
                await asyncio.sleep(0.5)


async def apply_model(gateway: Gateway, metadata: tuple = ()) -> None:
    manifest = {"apiVersion": "modelyard/v1", "kind": "Model", "metadata": {"name": "m"}, "spec": {"source": "file:/x"}}
    thing = admin_pb2.Object(kind="Model", name="m", manifest_json=msgspec.json.encode(manifest).decode())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        await AdminStub(channel).Apply(admin_pb2.ApplyRequest(objects=[thing]), timeout=10, metadata=metadata)


async def until(condition: Callable[[], bool], gateway: Gateway) -> None:
    """Waits for what a change of the view brings about."""
    changed = asyncio.Event()
    end = gateway.view.subscribe(changed.set)
    try:
        async with asyncio.timeout(15):
            while not condition():
                changed.clear()
                await asyncio.wait([asyncio.ensure_future(changed.wait())], timeout=0.2)
    finally:
        end()


async def generate(gateway: Gateway, **options: object) -> inference_pb2.GenerateResponse:
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{gateway.grpc_port}", options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        return await InferenceStub(channel).Generate(inference_pb2.GenerateRequest(model="m", prompt="x"), timeout=10, **options)


async def serving(make: Make, pool: ScriptedPool, byte_level: Path) -> Gateway:
    pool.script = lambda sequence: sequence.end("length", tokens=ids_of(byte_level, "yes"))
    gateway = await make()
    await apply_model(gateway)
    await until(lambda: "m" in gateway.view.models and any(link.up for link in gateway._links.holding("m")), gateway)
    return gateway


async def test_from_redis_to_an_answer(
    make: Make, own_valkey: ValkeyServer, site: str, pool: ScriptedPool, byte_level: Path
) -> None:
    async with Heartbeat(own_valkey, site, pool), Redis.from_url(own_valkey.url) as redis:
        gateway = await serving(make, pool, byte_level)
        assert (await generate(gateway)).choices[0].text == "yes"
        keys = Keys(site)
        [name] = await redis.smembers(keys.gateways)
        record = msgspec.json.decode(await redis.get(keys.gateway(name.decode())), type=GatewayRecord)
        assert record.grpc_endpoint == f"127.0.0.1:{gateway.grpc_port}"
        assert record.http_endpoint == f"127.0.0.1:{gateway.http_port}"
        gateway.check_health()


async def test_redis_goes_and_comes_back(
    make: Make, own_valkey: ValkeyServer, site: str, pool: ScriptedPool, byte_level: Path
) -> None:
    """rule 12: without Redis the last snapshot serves, marked degraded; changes are refused; on its return all is well."""
    async with Heartbeat(own_valkey, site, pool):
        gateway = await serving(make, pool, byte_level)
        own_valkey.stop()
        await until(lambda: gateway.view.degraded, gateway)
        await asyncio.sleep(6)  # longer than a heartbeat lives
        assert (await generate(gateway)).choices[0].text == "yes"
        async with httpx.AsyncClient() as client:
            body = {"model": "m", "prompt": "x"}
            response = await client.post(f"http://127.0.0.1:{gateway.http_port}/v1/completions", json=body)
            assert response.headers["x-modelyard-degraded"] == "true"
            assert (await client.get(f"http://127.0.0.1:{gateway.http_port}/ready")).status_code == 200
            assert (
                'modelyard_degraded{gateway="0"} 1.0' in (await client.get(f"http://127.0.0.1:{gateway.http_port}/metrics")).text
            )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await apply_model(gateway)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        own_valkey.start()
        await until(lambda: not gateway.view.degraded, gateway)
        await until(lambda: any(link.up for link in gateway._links.holding("m")), gateway)
        assert (await generate(gateway)).choices[0].text == "yes"


async def test_two_gateways_on_one_port(
    make: Make, own_valkey: ValkeyServer, site: str, pool: ScriptedPool, byte_level: Path
) -> None:
    """Replicas on one node share the ports; the kernel spreads the connections, and one may go while the other serves."""
    async with Heartbeat(own_valkey, site, pool):
        first = await serving(make, pool, byte_level)
        second = await make(grpc_port=first.grpc_port, http_port=first.http_port)
        await until(lambda: any(link.up for link in second._links.holding("m")), second)
        for _ in range(30):
            assert (await generate(first)).choices[0].text == "yes"
        served = [gateway._metrics.requests.labels("grpc", "m", "ok")._value.get() for gateway in (first, second)]
        assert sum(served) == 30
        assert min(served) > 0
        await first.stop(0.0)
        for _ in range(5):
            assert (await generate(second)).choices[0].text == "yes"


@pytest.mark.parametrize("how", ["sharing", "alone", "grpc"])
@pytest.mark.parametrize("which", ["grpc_port", "http_port"])
async def test_a_port_that_someone_else_has(make: Make, which: str, how: str) -> None:
    """Also when that someone would share it: it would get part of our connections."""
    port = free_port()
    pipe = asyncio.subprocess.PIPE
    foreign = await asyncio.create_subprocess_exec(sys.executable, "-c", FOREIGN, str(port), how, stdin=pipe, stdout=pipe)
    assert foreign.stdin is not None
    assert foreign.stdout is not None
    await foreign.stdout.readline()
    try:
        with pytest.raises(YardError) as caught:
            await make(**{which: port})
    finally:
        foreign.stdin.close()
        await foreign.wait()
    assert caught.value.code is ErrorCode.CONFLICT
    assert f"127.0.0.1:{port}" in caught.value.message
    assert f"process {foreign.pid}" in caught.value.message


def test_claims_of_killed_gateways_are_cleared(tmp_path: Path) -> None:
    (tmp_path / "gateways").mkdir()
    stale = tmp_path / "gateways" / "999999999.x"
    stale.touch()
    with claimed_ports(tmp_path, "127.0.0.1", (0,)):
        assert not stale.exists()
        assert len(list((tmp_path / "gateways").iterdir())) == 1
    assert list((tmp_path / "gateways").iterdir()) == []


async def test_stopping_drains(make: Make, own_valkey: ValkeyServer, site: str, pool: ScriptedPool, byte_level: Path) -> None:
    """Not ready is announced first, running streams finish, the record is gone."""
    async with Heartbeat(own_valkey, site, pool), Redis.from_url(own_valkey.url) as redis:
        gateway = await serving(make, pool, byte_level)
        pool.script = None
        http = f"http://127.0.0.1:{gateway.http_port}"
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
            httpx.AsyncClient() as client,
        ):
            stream = InferenceStub(channel).GenerateStream(inference_pb2.GenerateRequest(model="m", prompt="x"), timeout=30)
            streaming = await pool.next()
            whole = asyncio.create_task(client.post(f"{http}/v1/completions", json={"model": "m", "prompt": "x"}))
            waiting = await pool.next()
            stopping = asyncio.create_task(gateway.stop(10.0))
            async with httpx.AsyncClient() as other:
                assert (await other.get(f"{http}/ready")).status_code == 503
            assert await redis.smembers(Keys(site).gateways) == set()
            await asyncio.sleep(1.2)
            assert await redis.smembers(Keys(site).gateways) == set()  # no heartbeat has put it back
            for sequence in (streaming, waiting):
                sequence.tokens(ids_of(byte_level, "yes"))
                sequence.end("length")
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].text for chunk in chunks) == "yes"
            assert (await whole).json()["choices"][0]["text"] == "yes"
        await stopping
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient().get(f"{http}/ready")


async def test_what_outlives_the_drain_is_told_so(
    make: Make, own_valkey: ValkeyServer, site: str, pool: ScriptedPool, byte_level: Path
) -> None:
    """Rule 9: with a status that clients repeat, also for a request that waits for its first token."""
    async with Heartbeat(own_valkey, site, pool):
        gateway = await serving(make, pool, byte_level)
        pool.script = None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
            inference = InferenceStub(channel)
            stream = inference.GenerateStream(inference_pb2.GenerateRequest(model="m", prompt="x"), timeout=30)
            (await pool.next()).tokens(ids_of(byte_level, "y"))
            assert (await stream.read()).choices[0].text == "y"
            whole = inference.Generate(inference_pb2.GenerateRequest(model="m", prompt="x"), timeout=30)
            await pool.next()
            stopping = asyncio.create_task(gateway.stop(1.5))
            for call in (stream.read(), whole):
                with pytest.raises(grpc.aio.AioRpcError, match="the gateway stops") as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await stopping


async def test_calls_that_meet_a_closing_server_can_be_repeated(
    make: Make, own_valkey: ValkeyServer, site: str, pool: ScriptedPool, byte_level: Path
) -> None:
    """With the retries that the README names, no client sees CANCELLED for a call that it did not cancel."""
    ends: Counter[str] = Counter()

    async def ask(address: str) -> None:
        async with grpc.aio.insecure_channel(address, options=[RETRY_OPTION]) as channel:
            while not ends["UNAVAILABLE"]:
                try:
                    await InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest(), timeout=10)
                    ends["answered"] += 1
                except grpc.aio.AioRpcError as error:
                    ends[error.code().name] += 1

    gateway = await make()
    asking = [asyncio.create_task(ask(f"127.0.0.1:{gateway.grpc_port}")) for _ in range(8)]
    await asyncio.sleep(0.3)
    await gateway.stop(1.0)
    await asyncio.gather(*asking)
    assert ends["answered"] > 100
    assert set(ends) == {"answered", "UNAVAILABLE"}


async def test_admin_needs_the_secret_off_loopback(make: Make) -> None:
    """rule 15: admin needs credentials unless it is bound to loopback; what serves requests does not."""
    gateway = await make(bind_host="0.0.0.0")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await apply_model(gateway)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert SECRET not in caught.value.details()
    with pytest.raises(grpc.aio.AioRpcError):
        await apply_model(gateway, ((SECRET_METADATA_KEY, "wrong"),))
    await apply_model(gateway, ((SECRET_METADATA_KEY, SECRET),))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        events = AdminStub(channel).Events(admin_pb2.EventsRequest(), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await events.read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await GRPCInferenceServiceStub(channel).RepositoryModelUnload(RepositoryModelUnloadRequest(model_name="m"), timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        models = await InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest(), timeout=5)
        assert [model.name for model in models.models] == ["m"]


async def test_before_the_first_snapshot_it_listens_and_is_not_ready(make: Make, own_valkey: ValkeyServer) -> None:
    own_valkey.stop()
    gateway = await make()
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{gateway.http_port}/ready")).status_code == 503
        assert (await client.get(f"http://127.0.0.1:{gateway.http_port}/health")).json()["status"] == "degraded"
    own_valkey.start()
    await until(lambda: gateway._health.accepting, gateway)
