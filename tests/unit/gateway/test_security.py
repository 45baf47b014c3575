"""Who may do what, what is refused before it costs anything, and certificates that are renewed under way."""

from __future__ import annotations

import hashlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
from lone_gateway import LoneGateway
from scripted_pool import ScriptedPool

from gateway.admission.caller import identify
from gateway.api.errors import ErrorCode, YardError
from gateway.api.proto.inference_pb2 import GenerateRequest, ListModelsRequest, TokenizeRequest
from gateway.api.proto.inference_pb2_grpc import InferenceStub
from gateway.api.records import DesiredObject
from gateway.api.runtime import SECRET_METADATA_KEY, TlsFiles
from gateway.servers.admin_guard import AdminAccess, actor_of, role_of
from gateway.servers.client_limits import ClientLimits
from gateway.servers.public_servers import Limits, PublicServers
from gateway.servers.tls import ServerTls
from gateway.state.history import changed_fields
from gateway.state.snapshot import ObjectKey, Snapshot
from gateway.state.view import SiteView

KEYS = {"app": "infer", "duty": "operate", "root": "admin"}
ADMIN = "/modelyard.v1.Admin/"


def with_keys(lone: LoneGateway) -> LoneGateway:
    for name, role in KEYS.items():
        digest = hashlib.sha256(f"key-of-{name}".encode()).hexdigest()
        lone.put("Tenant", name, {"key_hashes": [digest], "role": role})
    return lone


def bearer(name: str) -> list[tuple[str, str | bytes]]:
    return [("authorization", f"Bearer key-of-{name}")]


@pytest.mark.parametrize("method", ["Status", "SwitchRoute", "SetResidency", "Apply", "Delete", "Restore", "AMethodOfTomorrow"])
async def test_roles(lone: LoneGateway, method: str) -> None:
    """Rule 15: what a key may do is its tenant's role; what nobody classified needs the most."""
    access = AdminAccess("the-secret", with_keys(lone).view, loopback=False)
    needed = role_of(ADMIN + method)
    assert needed == ("operate" if method in ("Status", "SwitchRoute", "SetResidency") else "admin")
    for name, role in KEYS.items():
        if role == "infer" or (role == "operate" and needed == "admin"):
            with pytest.raises(YardError) as refused:
                access.check(bearer(name), needed)
            assert refused.value.code is ErrorCode.DENIED
            assert f"key-of-{name}" not in refused.value.message
        else:
            assert access.check(bearer(name), needed) == f"tenant {name}"


async def test_without_credentials_only_on_loopback(lone: LoneGateway) -> None:
    """Rule 15: admin needs credentials unless it is bound to loopback."""
    view = with_keys(lone).view
    here, elsewhere = (AdminAccess("the-secret", view, loopback=loopback) for loopback in (True, False))
    assert here.check([], "admin") == ""
    for wrong in ([], bearer("nobody"), [(SECRET_METADATA_KEY, "another")], [(SECRET_METADATA_KEY, b"\xff")]):
        with pytest.raises(YardError) as refused:
            elsewhere.check(wrong, "operate")
        assert refused.value.code is ErrorCode.UNAUTHENTICATED
    assert elsewhere.check([(SECRET_METADATA_KEY, "the-secret")], "admin") == "the site"
    with pytest.raises(YardError):
        AdminAccess("", view, loopback=False).check([(SECRET_METADATA_KEY, "")], "admin")
    with pytest.raises(YardError):
        here.check(bearer("app"), "operate")  # credentials that are given count, also here


async def test_the_audit_names_the_owner_of_the_key(lone: LoneGateway) -> None:
    view = with_keys(lone).view
    assert actor_of([*bearer("root"), ("modelyard-actor", "kim@host")], "peer", view) == "tenant root for kim@host"
    assert actor_of([("modelyard-actor", "kim@host")], "peer", view) == "kim@host"
    assert actor_of([], "ipv4:10.0.0.1:99", view) == "someone at ipv4:10.0.0.1:99"


def test_the_audit_says_from_and_to() -> None:
    """Rule 15: of hashes of keys only how many there are."""
    before = {"limits": {"concurrency": 16, "queue": 4}, "key_hashes": ["a" * 64], "source": "x" * 500}
    after = {"limits": {"concurrency": 32, "queue": 4}, "key_hashes": ["a" * 64, "b" * 64], "role": "admin"}
    changes = changed_fields(before, after)
    assert changes[:3] == [
        ("key_hashes", "1 keys", "2 keys"),
        ("limits.concurrency", "16", "32"),
        ("role", "nothing", "admin"),
    ]
    [(_, source, _)] = changes[3:]
    assert len(source) < 100
    targets = [{"model": "a", "weight": 100}], [{"model": "b", "weight": 90}, {"model": "c", "weight": 10}]
    assert changed_fields({"targets": targets[0]}, {"targets": targets[1]}) == [("targets", "a", "b:90, c:10")]


# ------------------------------------------------------------------ limits


async def test_one_client_does_not_take_all_streams(lone: LoneGateway, pool: ScriptedPool) -> None:
    lone.servers._clients._streams = 2
    calls = [lone.inference.Generate(GenerateRequest(model="m", prompt="x")) for _ in range(2)]
    held = [await pool.next() for _ in calls]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await lone.inference.Generate(GenerateRequest(model="m", prompt="x"))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "streams_per_client" in (refused.value.details() or "")
    async with httpx.AsyncClient() as client:
        mine = {"authorization": "Bearer of-somebody-else"}
        assert (await client.get(f"{lone.http}/v1/models", headers=mine)).status_code == 200
        assert (await client.get(f"{lone.http}/metrics")).status_code == 200
    for sequence in held:
        sequence.end("length")
    for call in calls:
        await call
    assert len(lone.servers._clients) == 0
    await lone.inference.ListModels(ListModelsRequest())


async def test_http_says_when_to_come_back(lone: LoneGateway) -> None:
    lone.servers._clients._streams = 0
    async with httpx.AsyncClient() as client:
        response = await client.get(f"{lone.http}/v1/models")
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["type"]


def test_a_client_without_streams_is_forgotten() -> None:
    limits = ClientLimits(1)
    with limits.stream("a"), pytest.raises(YardError), limits.stream("a"):
        pass
    assert len(limits) == 0


async def test_sizes_are_limited(lone: LoneGateway) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await lone.inference.ListModels(ListModelsRequest(), metadata=[("x-long", "y" * 2**17)])
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with httpx.AsyncClient() as client:
        response = await client.get(f"{lone.http}/health", headers={"x-long": "y" * 2**18})
        assert response.status_code == 431
        assert (await client.get(f"{lone.http}/health")).status_code == 200


# ------------------------------------------------------------------ TLS


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def certificate(directory: Path, name: str, ca: str = "ca") -> tuple[Path, Path]:
    key, cert = directory / f"{name}.key", directory / f"{name}.pem"
    request = directory / f"{name}.csr"
    alternative = directory / "san"
    alternative.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request))
    signer = ("-CA", str(directory / f"{ca}.pem"), "-CAkey", str(directory / f"{ca}.key"), "-CAcreateserial")
    openssl("x509", "-req", "-in", str(request), *signer, "-days", "2", "-extfile", str(alternative), "-out", str(cert))
    return cert, key


def authority(directory: Path, name: str = "ca") -> Path:
    pair = ("-keyout", str(directory / f"{name}.key"), "-out", str(directory / f"{name}.pem"))
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}", *pair)
    return directory / f"{name}.pem"


@pytest.fixture
async def mutual(tmp_path: Path, byte_level: Path) -> AsyncIterator[LoneGateway]:
    """A gateway that shows a certificate and asks for one."""
    if shutil.which("openssl") is None:
        pytest.skip("makes certificates with openssl")
    ca = authority(tmp_path)
    cert, key = certificate(tmp_path, "server")
    certificate(tmp_path, "client")
    lone = LoneGateway(tmp_path, {"m": byte_level})
    tls = ServerTls(TlsFiles(str(cert), str(key), str(ca)))
    lone.servers = PublicServers(run_dir=tmp_path, host="127.0.0.1", grpc_port=0, http_port=0, tls=tls, limits=Limits())
    try:
        yield await lone.start()
    finally:
        await lone.stop()


async def names(lone: LoneGateway, directory: Path, client: str = "", ca: str = "ca") -> int:
    pair = [(directory / f"{client}{end}").read_bytes() for end in (".key", ".pem")] if client else [None, None]
    credentials = grpc.ssl_channel_credentials((directory / f"{ca}.pem").read_bytes(), *pair)
    async with grpc.aio.secure_channel(f"localhost:{lone.servers.grpc_port}", credentials) as channel:
        return len((await InferenceStub(channel).ListModels(ListModelsRequest(), timeout=5)).models)


def http_client(directory: Path, client: str = "", ca: str = "ca") -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=directory / f"{ca}.pem")
    if client:
        context.load_cert_chain(directory / f"{client}.pem", directory / f"{client}.key")
    return httpx.AsyncClient(verify=context)


async def test_mutual_tls_and_renewal(mutual: LoneGateway, tmp_path: Path) -> None:
    """Both surfaces ask for a client's certificate; after a renewal, by another authority at that, both show the new one."""
    url = f"https://localhost:{mutual.servers.http_port}/v1/models"
    assert await names(mutual, tmp_path, "client") == 1
    async with http_client(tmp_path, "client") as client:
        assert (await client.get(url)).status_code == 200
    with pytest.raises(grpc.aio.AioRpcError):
        await names(mutual, tmp_path)
    async with http_client(tmp_path) as client:
        with pytest.raises(httpx.HTTPError):
            await client.get(url)

    tls = mutual.servers._tls
    assert tls is not None
    authority(tmp_path, "new-ca")
    cert, key = certificate(tmp_path, "renewed", "new-ca")
    shutil.copy(cert, tmp_path / "server.pem")
    tls.refresh()  # in the middle of a renewal: the key is the old one still
    assert await names(mutual, tmp_path, "client") == 1
    shutil.copy(key, tmp_path / "server.key")
    tls.refresh()
    assert await names(mutual, tmp_path, "client", ca="new-ca") == 1
    async with http_client(tmp_path, "client", ca="new-ca") as client:
        assert (await client.get(url)).status_code == 200
    with pytest.raises(grpc.aio.AioRpcError):
        await names(mutual, tmp_path, "client")


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(YardError, match=r"nowhere\.pem.*spec\.listen\.tls"):
        ServerTls(TlsFiles(str(tmp_path / "nowhere.pem"), str(tmp_path / "nowhere.key")))


async def test_a_tenant_sees_only_what_it_may_ask(lone: LoneGateway) -> None:
    """By whatever surface it looks; of other names it is told the same as of names that do not exist."""
    lone.put("Route", "chat", {"targets": [{"model": "m"}], "aliases": ["talk"]})
    lone.put("Route", "secret", {"targets": [{"model": "m"}]})
    digest = hashlib.sha256(b"key-of-app").hexdigest()
    lone.put("Tenant", "app", {"key_hashes": [digest], "routes": ["chat"]})
    async with httpx.AsyncClient(base_url=lone.http, headers={"authorization": "Bearer key-of-app"}) as http:
        models = (await http.get("/v1/models")).json()["data"]
        assert [item["id"] for item in models] == ["chat", "talk"]
        assert (await http.get("/v1/models/talk")).status_code == 200
        for name in ("secret", "m", "nowhere"):
            answer = await http.get(f"/v1/models/{name}")
            assert answer.status_code == 403
            assert answer.json()["error"]["message"].replace(f"`{name}`", "`X`") == (
                "tenant `app` may not ask `X`; it may ask chat; see spec.routes of the Tenant"
            )
    listed = await lone.inference.ListModels(ListModelsRequest(), metadata=bearer("app"))
    assert [item.name for item in listed.models] == ["chat"]
    for name in ("secret", "nowhere"):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await lone.inference.Tokenize(TokenizeRequest(model=name, text="x"), metadata=bearer("app"))
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_keys_are_needed_while_a_stored_tenant_has_some_that_cannot_be_read() -> None:
    document = {"kind": "Tenant", "metadata": {"name": "t"}, "spec": {"key_hashes": ["of another version"]}}
    view = SiteView()
    view.apply_desired(Snapshot(1, {ObjectKey("Tenant", "t"): DesiredObject("Tenant", "t", 1, 1, document, 0.0)}))
    assert view.rejected
    with pytest.raises(YardError, match="asks for an API key"):
        identify(view, {})
