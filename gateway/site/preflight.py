"""What `yard up` makes sure of before it starts anything, so that failures are early and say what to do."""

from __future__ import annotations

import errno
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

from gateway.api.config import ModelSpec, PoolSpec
from gateway.api.errors import ErrorCode, YardError, invalid, unavailable
from gateway.api.manifest import Located

_HOME_FREE_BYTES = 1 << 30
_RUN_FREE_BYTES = 256 << 20


def check_ports(host: str, ports: dict[str, int]) -> None:
    """`ports`: option name (as in --grpc-port) -> port; 0 stands for any. YardError names who holds a taken one."""
    for option, port in ports.items():
        address = "127.0.0.1" if option == "dashboard-port" else host
        try:
            _bind(address, port)
        except OSError as error:
            raise _port_error(error, address, port, option) from error
    chosen = [port for port in ports.values() if port]
    if len(set(chosen)) != len(chosen):
        raise invalid(f"the ports must differ: {', '.join(f'--{name} {port}' for name, port in ports.items())}")


def _bind(address: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
        # Binding alone succeeds beside a listener that also set SO_REUSEADDR.
        probe.listen(1)


def _port_error(error: OSError, address: str, port: int, option: str) -> YardError:
    if error.errno == errno.EADDRINUSE:
        return unavailable(f"port {port} on {address} is taken by {holder(port)}; stop it, or choose another with --{option}")
    return invalid(
        f"cannot listen on {address}:{port}: {error.strerror}; choose another with --{option} or listen.host in site.yaml"
    )


def holder(port: int) -> str:
    """Who listens on a TCP port, in words."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr[1] == port and connection.pid:
                process = psutil.Process(connection.pid)
                command = " ".join(" ".join(process.cmdline()).split())
                return f"{process.name()} (pid {connection.pid}: {command[:80]}{'…' if len(command) > 80 else ''})"
    except psutil.Error:
        return "a process that this user may not look into"
    return "another process"


def check_disk(home: Path, run_dir: Path, home_bytes: int = _HOME_FREE_BYTES, run_bytes: int = _RUN_FREE_BYTES) -> None:
    for path, needed, purpose in (
        (home, home_bytes, "converted weights and state"),
        (run_dir, run_bytes, "Ray's session and logs"),
    ):
        free = shutil.disk_usage(path).free
        if free < needed:
            raise YardError(
                ErrorCode.EXHAUSTED,
                f"the disk of {path} is full: {free >> 20} MiB free, {needed >> 20} MiB needed for {purpose}; make room, "
                "or set MODELYARD_HOME to a directory on another disk",
            )


def check_memory(documents: Sequence[Located]) -> None:
    """The pools of CPU ranks must fit in the memory of this machine, all of them together."""
    total = psutil.virtual_memory().total
    before = 0
    for document in documents:
        spec = document.manifest.spec
        if isinstance(spec, PoolSpec) and spec.device == "cpu" and spec.memory is not None:
            wanted = spec.memory * spec.devices
            if before + wanted > total:
                beside = f" beside the {before / 2**30:.1f} GiB of the others" if before else ""
                raise invalid(
                    f"{document.where}: Pool {document.manifest.name} wants {spec.devices} × {spec.memory / 2**30:.1f} GiB"
                    f"{beside}, this machine has {total / 2**30:.1f} GiB; lower spec.memory or spec.devices"
                )
            before += wanted


async def check_redis(redis_url: str) -> None:
    """An existing server must answer, be at least of version 6.2, and accept writes."""
    from redis.exceptions import AuthenticationError, RedisError

    from gateway.api.redis_link import connect

    where = _without_password(redis_url)
    try:
        client = connect(redis_url)
    except ValueError as error:
        raise invalid(f"--redis: {error}") from error
    try:
        server = await client.info("server")
        replication = await client.info("replication")
    except AuthenticationError as error:
        raise YardError(ErrorCode.UNAUTHENTICATED, f"Redis at {where} refused the credentials in its URL: {error}") from error
    except (RedisError, OSError) as error:
        raise unavailable(f"Redis at {where} is not reachable: {error}; start it, or correct --redis or spec.redis") from error
    finally:
        await client.aclose()
    version = str(server.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < (6, 2):
        raise invalid(f"Redis at {where} is version {version}; Modelyard needs 6.2 or later, or any Valkey")
    if replication.get("role") == "slave":
        raise invalid(f"Redis at {where} is a replica and takes no writes; name the primary, or use a redis+sentinel:// URL")


def _without_password(redis_url: str) -> str:
    scheme, separator, rest = redis_url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}"


def check_ray(address: str, timeout_s: float = 3.0) -> None:
    """A Ray head must listen at `host:port`; Ray's own client would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise invalid(f"--ray-address {address}: write HOST:PORT, as `ray start --head` prints it")
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except OSError as error:
        raise unavailable(f"no Ray at {address}: {error.strerror or error}; start it, or leave --ray-address out") from error


def check_models(documents: Sequence[Located], cache_dir: Path) -> None:
    """Opens the headers of every model's files. A corrupt or missing one is named here, not after a minute of starting."""
    from gateway.api.checkpoint import open_checkpoint

    for document in documents:
        spec = document.manifest.spec
        if isinstance(spec, ModelSpec) and spec.replicas > 0 and spec.is_managed:
            try:
                open_checkpoint(spec.source, cache_dir)
            except YardError as error:
                raise YardError(error.code, f"{document.where}: Model {document.manifest.name}: {error.message}") from error
