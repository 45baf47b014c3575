"""One `/metrics` for all gateways of a node: they share its port, so a scrape reaches any of them and asks the others.

Each gateway takes the lowest free place, a small number that becomes the label `gateway`, and answers its siblings on a loopback
port that is written into the file of its place. The file is locked for as long as the process lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

log = logging.getLogger(__name__)

SIBLING_S = 1.0
"""A sibling that hangs is left out."""
_PLACES = 1024


class NodeMetrics:
    """`own`: what this gateway counts, labelled by its place. `shared`: what every gateway says alike; taken from this one."""

    def __init__(self, run_dir: Path, own: CollectorRegistry, shared: CollectorRegistry) -> None:
        self._directory = run_dir / "metrics"
        self._own = own
        self._shared = shared
        self._server: asyncio.Server | None = None
        self._lock: int | None = None
        self.place = 0

    async def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self.place, self._lock = _take_place(self._directory)
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        os.pwrite(self._lock, b"%5d" % self._server.sockets[0].getsockname()[1], 0)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
        self._server = self._lock = None

    async def text(self) -> bytes:
        """In Prometheus' text format."""
        siblings = await asyncio.gather(*(_ask(port) for port in self._siblings()))
        return joined([self._mine(), *siblings]) + generate_latest(self._shared)

    def families(self) -> Iterator[Metric]:
        """What this gateway counts, and what all say alike, without the siblings."""
        yield from self._labelled().collect()
        yield from self._shared.collect()

    def _labelled(self) -> _Labelled:
        return _Labelled(self._own, "gateway", str(self.place))

    def _mine(self) -> bytes:
        return generate_latest(self._labelled())  # type: ignore[arg-type]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(self._mine())
            await writer.drain()
        writer.close()

    def _siblings(self) -> list[int]:
        ports = []
        for file in self._directory.glob("*.port"):
            if file.stem != str(self.place) and (text := file.read_text().strip()).isdigit() and not _is_free(file):
                ports.append(int(text))
        return ports


class _Labelled(Collector):
    """All samples of a registry with one more label."""

    def __init__(self, registry: CollectorRegistry, name: str, value: str) -> None:
        self._registry = registry
        self._label = {name: value}

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            samples = [sample._replace(labels=self._label | sample.labels) for sample in metric.samples]
            copy = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            copy.samples = [Sample(*sample) for sample in samples]
            yield copy


def joined(texts: list[bytes]) -> bytes:
    """Several expositions as one, in which each family has its head once."""
    families: dict[bytes, list[bytes]] = {}
    for text in texts:
        head = b""
        for line in text.splitlines():
            if line.startswith(b"# HELP "):
                head = line
            elif line.startswith(b"# TYPE "):
                head += b"\n" + line
                families.setdefault(head, [])
            elif line:
                families.setdefault(head, []).append(line)
    return b"".join(head + b"\n" + b"".join(line + b"\n" for line in lines) for head, lines in families.items())


async def _ask(port: int) -> bytes:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(SIBLING_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                return await reader.read(-1)
            finally:
                writer.close()
    return b""


def _take_place(directory: Path) -> tuple[int, int]:
    for place in range(_PLACES):
        descriptor = os.open(directory / f"{place}.port", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _lock(descriptor):
            os.ftruncate(descriptor, 0)
            return place, descriptor
        os.close(descriptor)
    raise RuntimeError(f"{_PLACES} gateways of one site on one node; {directory} has no place for another")


def _is_free(file: Path) -> bool:
    """Its owner is gone. A lock that this process holds through another descriptor counts as held."""
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
