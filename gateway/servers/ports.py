"""The gateway's addresses. Gateways of one site share their ports on a node; nobody else may be on them."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from gateway.api.errors import ErrorCode, YardError
from gateway.servers import slow_reader

_ALL_ADDRESSES = {"0.0.0.0", "::"}


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


@contextlib.contextmanager
def claimed_ports(run_dir: Path, host: str, ports: tuple[int, ...]) -> Iterator[None]:
    """While it holds, this process is known as one that may share these ports with its siblings.

    SO_REUSEPORT lets any process of the same user join a port, and the kernel then gives it part of the connections. So a
    port that is in use is joined only when all that listen on it are gateways of this site, which say so in `run_dir`.
    YardError(CONFLICT) names the port, who has it and what to do.
    """
    directory = run_dir / "gateways"
    directory.mkdir(parents=True, exist_ok=True)
    claim = directory / f"{os.getpid()}.{uuid.uuid4().hex}"
    claim.touch()
    try:
        siblings = _living(directory)
        for port in ports:
            if port and not _is_free(host, port):
                _check_listeners(host, port, siblings)
        yield
    finally:
        claim.unlink(missing_ok=True)


def _living(directory: Path) -> set[int]:
    """The processes with a claim; claims of those that were killed are cleared away."""
    pids = set()
    for entry in directory.iterdir():
        pid = int(entry.name.partition(".")[0])
        if psutil.pid_exists(pid):
            pids.add(pid)
        else:
            entry.unlink(missing_ok=True)
    return pids


def shared_socket(host: str, port: int) -> socket.socket:
    """A listening socket that siblings can join. YardError(CONFLICT) when the port is taken by someone who does not share."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Connections inherit it: what a client has not taken for so long is dropped, also after we closed our end.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(slow_reader.WRITE_S * 1000))
        listener.bind((host, port))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise taken(host, port, str(error)) from error
    return listener


def taken(host: str, port: int, cause: str) -> YardError:
    return YardError(
        ErrorCode.CONFLICT,
        f"the gateway cannot listen on {host}:{port}: {cause}; stop what uses it, or set another port "
        "under spec.listen of the Site",
    )


def _is_free(host: str, port: int) -> bool:
    """Whether nobody listens there. Connections that linger after their listener's end do not count."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise taken(host, port, str(error)) from error
    return True


def _check_listeners(host: str, port: int, siblings: set[int]) -> None:
    holders = _listeners(host, port)
    foreign = [pid for pid in holders if pid not in siblings]
    if foreign or not holders:
        raise taken(host, port, f"it is used by {_process(foreign[0] if foreign else None)}")


def _listeners(host: str, port: int) -> list[int | None]:
    """The processes that listen there; None for one that cannot be seen from here."""
    pids = []
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN:
            address, listened_port = tuple(connection.laddr)
            address = str(address).removeprefix("::ffff:")  # gRPC listens on IPv4 addresses through IPv6 sockets
            if listened_port == port and (address == host or {address, host} & _ALL_ADDRESSES):
                pids.append(connection.pid)
    return pids


def _process(pid: int | None) -> str:
    if pid is None:
        return "a process that cannot be seen from here"
    with contextlib.suppress(psutil.Error):
        return f"process {pid} ({psutil.Process(pid).name()})"
    return f"process {pid}"
