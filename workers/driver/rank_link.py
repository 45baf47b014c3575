"""The driver's connections to its ranks: commands out in one order, reports in, and the moment one of them is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from gateway.api.errors import unavailable
from workers.messages import PROTOCOL, Command, Done, Hello, Report, Welcome, decode_report, encode
from workers.rank.config import NONCE_BYTES, proof

HANDSHAKE_TIMEOUT_S = 60.0
MAX_FRAME_BYTES = 64 * 2**20


class RankLink:
    """One rank's connection."""

    def __init__(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, welcome: Welcome) -> None:
        self.rank = rank
        self.welcome = welcome
        self._reader = reader
        self._writer = writer
        self._task: asyncio.Task[None] | None = None

    def send(self, command: Command) -> None:
        """Never waits. A connection that is gone is reported by `on_lost`, not here."""
        if not self._writer.is_closing():
            self._writer.write(encode(command))

    async def expect_done(self, op: int) -> Done:
        """Before `start`: the end of an operation, passing over what an earlier driver left. YardError when the rank is lost."""
        try:
            while True:
                report = await _read(self._reader)
                if isinstance(report, Done) and report.op == op:
                    return report
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError, ValueError) as error:
            raise unavailable(f"rank {self.rank} went away: {error!r}") from error

    def start(
        self,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        on_report: Callable[[int, Report], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        """`spawn` owns the task that reads."""
        self._task = spawn(self._read(on_report, on_lost), f"rank-{self.rank}")

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._writer.close()

    async def _read(self, on_report: Callable[[int, Report], None], on_lost: Callable[[int, str], None]) -> None:
        try:
            while True:
                on_report(self.rank, await _read(self._reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            on_lost(self.rank, f"rank {self.rank} (pid {self.welcome.pid}) is gone")
        except (msgspec.MsgspecError, ValueError) as error:
            on_lost(self.rank, f"rank {self.rank} (pid {self.welcome.pid}) sent what is no report: {error}")


async def dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """`unix:PATH` or `tcp:HOST:PORT`. OSError when nobody listens there."""
    kind, _, where = address.partition(":")
    if kind == "unix":
        return await asyncio.open_unix_connection(where)
    host, _, port = where.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def listens(address: str) -> bool:
    try:
        _, writer = await dial(address)
    except OSError:
        return False
    writer.close()
    return True


async def connect(rank: int, address: str, secret: str, driver: str) -> RankLink:
    """YardError(UNAVAILABLE) when nobody answers there or the rank refuses."""
    try:
        reader, writer = await dial(address)
    except OSError as error:
        raise unavailable(f"rank {rank} does not listen on {address}: {error}") from error
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            nonce = (await reader.readexactly(NONCE_BYTES)).decode()
            writer.write(encode(Hello(secret=proof(secret, nonce), driver=driver)))
            welcome = await _read(reader)
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, msgspec.MsgspecError, ValueError) as error:
        writer.close()
        raise unavailable(
            f"rank {rank} on {address} refused the handshake ({error!r}); its pool has another secret or release"
        ) from error
    if not isinstance(welcome, Welcome) or welcome.protocol != PROTOCOL or welcome.rank != rank:
        writer.close()
        raise unavailable(f"{address} does not belong to rank {rank} of this release")
    return RankLink(rank, reader, writer, welcome)


async def _read(reader: asyncio.StreamReader) -> Report:
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return decode_report(await reader.readexactly(length))
