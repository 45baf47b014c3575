"""The ways to reach the store: TLS whose certificate is checked, Sentinel whose master fails, a cluster that moves keys."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from free_port import free_port
from redis.asyncio import Redis
from site_documents import model
from valkey_server import ValkeyServer, binary

from gateway.api.errors import YardError
from gateway.api.redis_link import connect, with_site
from gateway.state.edits import Put
from gateway.state.store import SiteStore

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`cert.pem` and `key.pem` for 127.0.0.1, signed by itself."""
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
async def tls_port(certificate: Path, valkey: ValkeyServer) -> AsyncIterator[int]:
    """TLS in front of the Valkey of the tests, whose binary has none."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", valkey.port)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer), return_exceptions=True)

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
        sink.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_rediss_checks_the_certificate(tls_port: int, certificate: Path, site: str) -> None:
    store = SiteStore(f"rediss://127.0.0.1:{tls_port}/0?ssl_ca_certs={certificate / 'cert.pem'}", site)
    await store.apply([Put(model("m"))], actor="ann")
    assert (await store.get("Model", "m")) is not None
    await store.close()
    stranger = SiteStore(f"rediss://127.0.0.1:{tls_port}/0", site)
    with pytest.raises(YardError, match="cannot be reached"):
        await stranger.apply([Put(model("m"))], actor="ann")
    await stranger.close()


class SentinelSet:
    """A master, a replica of it, and one Sentinel that fails over after a second."""

    def __init__(self, folder: Path) -> None:
        self.servers = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            self.servers.append(ValkeyServer(folder / name))
        self.port = free_port()
        self.url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{self.port}/yard/0"  # the first one is down
        self._config = folder / "sentinel.conf"

    def start(self) -> None:
        for server in self.servers:
            server.start()
        first, second = (server.port for server in self.servers)
        self.command(second, "REPLICAOF", "127.0.0.1", str(first))
        self._config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self._config.parent}\nsentinel monitor yard 127.0.0.1 {first} 1\n"
            "sentinel down-after-milliseconds yard 500\nsentinel failover-timeout yard 3000\n"
        )
        log = self._config.with_suffix(".log").open("ab")
        self._sentinel = subprocess.Popen([str(binary()), str(self._config), "--sentinel"], stdout=log, stderr=log)
        self.until(lambda: b"num-slaves\r\n$1\r\n1" in self.command(self.port, "SENTINEL", "MASTERS"))

    def stop(self) -> None:
        self._sentinel.kill()
        self._sentinel.wait()
        for server in self.servers:
            server.stop()

    def until(self, condition) -> None:
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.05)

    def command(self, port: int, *words: str) -> bytes:
        try:
            with socket.create_connection(("127.0.0.1", port), 2) as connection:
                connection.sendall((" ".join(words) + "\r\n").encode())
                return connection.recv(65536)
        except OSError:
            return b""


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[SentinelSet]:
    servers = SentinelSet(tmp_path)
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()


async def test_sentinel_leads_to_the_new_master(sentinels: SentinelSet, site: str) -> None:
    """Rule 12: changes are refused while there is no master, and go on at the next one."""
    store = SiteStore(sentinels.url, site)
    await store.apply([Put(model("m"))], actor="ann")
    await store.redis.execute_command("WAIT", 1, 5000)
    sentinels.servers[0].stop()
    end = time.monotonic() + 30
    refusals = 0
    while True:
        try:
            await store.apply([Put(model("n"))], actor="ann")
            break
        except YardError:
            refusals += 1
            assert time.monotonic() < end
            await asyncio.sleep(0.2)
    assert refusals
    assert await store.get("Model", "m") is not None
    assert await store.get("Model", "n") is not None
    await store.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[ValkeyServer]]:
    """Two nodes; the first owns every slot."""
    nodes = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        nodes.append(ValkeyServer(tmp_path / name, "--cluster-enabled", "yes", "--cluster-port", str(free_port())))
    try:
        for node in nodes:
            node.start()
        yield nodes
    finally:
        for node in nodes:
            node.stop()


async def test_a_cluster_leads_to_the_node_that_owns_the_site(cluster: list[ValkeyServer], site: str) -> None:
    first, second = (Redis(port=node.port, decode_responses=True) for node in cluster)
    bus = int((await second.config_get("cluster-port"))["cluster-port"])
    await first.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
    await first.execute_command("CLUSTER MEET", "127.0.0.1", cluster[1].port, bus)
    async with asyncio.timeout(20):
        while (await second.execute_command("CLUSTER INFO"))["cluster_state"] != "ok":  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    hosts = f"127.0.0.1:{free_port()},127.0.0.1:{cluster[0].port}"  # the first one is down
    store = SiteStore(with_site(f"redis+cluster://{hosts}", site), site)
    await store.apply([Put(model("m"))], actor="ann")
    keys = await first.keys()
    assert keys

    slot, new_owner = await first.execute_command("CLUSTER KEYSLOT", keys[0]), await raw(second, "CLUSTER MYID")
    await second.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", await raw(first, "CLUSTER MYID"))
    await first.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", new_owner)
    await first.execute_command("MIGRATE", "127.0.0.1", cluster[1].port, "", 0, 5000, "KEYS", *keys)
    for node in (second, first):
        await node.execute_command("CLUSTER SETSLOT", slot, "NODE", new_owner)

    with pytest.raises(YardError, match="moved the site's keys to another node"):
        await store.apply([Put(model("n"))], actor="ann")
    await store.apply([Put(model("n"))], actor="ann")
    assert {key.name for key in (await store.snapshot()).objects} == {"m", "n"}
    assert sorted(await second.keys()) >= sorted(keys)
    for client in (store, first, second):
        await (client.close() if isinstance(client, SiteStore) else client.aclose())


async def raw(client: Redis, command: str) -> str:
    answer = await client.execute_command(command, NEVER_DECODE=True)
    return answer.decode() if isinstance(answer, bytes) else str(answer)


@pytest.mark.parametrize("url", ["http://h", "redis+sentinel://h:1", "redis+sentinel:///m", "redis+cluster://h:1"])
def test_a_url_that_says_too_little_names_the_form(url: str) -> None:
    with pytest.raises(ValueError, match=r"sentinel|cluster"):
        connect(url)
