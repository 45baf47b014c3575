"""A rank's end of the connection to its pool driver: one Unix socket, one driver at a time.

The rank outlives its driver: it keeps what it holds, and a new driver finds it in `Welcome`. Without a driver for
`grace_s`, or without its host process, it frees everything and exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from workers.memory.arena import Arena
from workers.messages import (
    PROTOCOL,
    Command,
    DeviceFacts,
    DeviceMemory,
    Done,
    Exit,
    GrowKv,
    HeldShard,
    Hello,
    LoadShard,
    ParkShard,
    Report,
    Step,
    StepDone,
    UnloadShard,
    WakeShard,
    Welcome,
    decode_command,
    encode,
)
from workers.rank.compute import ComputeThread, EngineFactory, GroupCommFactory
from workers.rank.config import NONCE_BYTES, RankConfig, endpoint_path, pid_path, proof
from workers.rank.device_load import LOAD_EVERY_S, HostLoad, LoadProbe
from workers.rank.host_memory import available_bytes

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 * 2**20
HELLO_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 10.0
EXIT_FATAL = 70


class RankServer:
    """Owns the compute thread. Everything here runs on the event loop; reports come to it from other threads."""

    def __init__(
        self,
        config: RankConfig,
        arena: Arena,
        make_comm: GroupCommFactory,
        make_engine: EngineFactory,
        prepare: Callable[[], None],
        memory: Callable[[], DeviceMemory | None] = lambda: None,
        make_load_probe: Callable[[], LoadProbe] = HostLoad,
        facts: DeviceFacts | None = None,
    ) -> None:
        """`prepare` runs first of all on the compute thread; `memory` says how the device stands. `make_load_probe` is called on
        a thread and may take a moment."""
        self._config = config
        self._prepare = prepare
        self._make_load_probe = make_load_probe
        self._arena = arena
        self._make_comm = make_comm
        self._make_engine = make_engine
        self._memory = memory
        self._facts = facts or DeviceFacts()
        self._held: dict[int, HeldShard] = {}
        self._received: dict[int, int] = {}
        self._unloads: dict[int, int] = {}  # op -> group
        self._live: dict[int, set[int]] = {}  # group -> sequences that it knows
        self._stale: dict[int, tuple[int, ...]] = {}  # group -> sequences of a driver that is gone
        self._writer: asyncio.StreamWriter | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._parent = os.getppid()
        self._host_bytes = available_bytes()
        self._driverless_since = 0.0
        self._ended: asyncio.Future[int]

    @property
    def _pid_path(self) -> Path:
        return pid_path(self._config.directory, self._config.rank)

    async def serve(self) -> int:
        """Until the process must end; its exit code."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        self._driverless_since = loop.time()

        def report(report: Report) -> None:
            loop.call_soon_threadsafe(self._on_report, report)

        def fatal(trace: str) -> None:
            loop.call_soon_threadsafe(self._on_fatal, trace)

        self._compute = ComputeThread(
            self._config.rank,
            self._arena,
            self._make_comm,
            self._make_engine,
            report=report,
            fatal=fatal,
            prepare=self._prepare,
        )
        self._compute.start()
        path = self._config.socket
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        previous_mask = os.umask(0o177)
        try:
            servers = [await asyncio.start_unix_server(self._on_connection, path=str(path))]
        finally:
            os.umask(previous_mask)
        if self._config.listen_host:
            server = await asyncio.start_server(self._on_connection, self._config.listen_host, 0)
            host, port = server.sockets[0].getsockname()[:2]
            endpoint_path(self._config.directory, self._config.rank).write_text(f"{host}:{port}")
            servers.append(server)
        self._pid_path.write_text(str(os.getpid()))
        watch = asyncio.create_task(self._watch(), name="watch")
        # A driver library that hangs must not hold up the end of the process, so it is asked on a thread that nobody waits for.
        threading.Thread(target=self._tell_load, args=(loop,), name="device-load", daemon=True).start()
        try:
            return await self._ended
        finally:
            watch.cancel()
            for server in servers:
                server.close()
            tasks = list(self._connections)
            for writer in self._connections.values():
                writer.close()
            await asyncio.gather(*tasks, return_exceptions=True)
            for left in (path, endpoint_path(self._config.directory, self._config.rank), self._pid_path):
                left.unlink(missing_ok=True)

    # ------------------------------------------------------------------ connection

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            nonce = secrets.token_hex(NONCE_BYTES // 2)
            writer.write(nonce.encode())
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await _read(reader)
            if not self._accept(hello, nonce):
                return
            self._attach(writer)
            while True:
                self._on_command(await _read(reader))
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass
        except (msgspec.MsgspecError, ValueError) as error:
            log.warning("rank %d: closing a connection that sent %s", self._config.rank, error)
        finally:
            if self._writer is writer:
                self._detach()
            del self._connections[task]
            writer.close()

    def _accept(self, hello: Command, nonce: str) -> bool:
        expected = proof(self._config.secret, nonce)
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.secret.encode(), expected.encode()):
            log.warning("rank %d: refused a connection without the pool's secret", self._config.rank)
            return False
        if hello.protocol != PROTOCOL:
            log.warning("rank %d: refused a driver of protocol %d, mine is %d", self._config.rank, hello.protocol, PROTOCOL)
            return False
        return True

    def _attach(self, writer: asyncio.StreamWriter) -> None:
        """The newest driver wins; what the one before it left under way is dropped."""
        if self._writer is not None:
            previous, self._writer = self._writer, None
            previous.close()
            self._forget_driver()
        self._writer = writer
        self._send(
            Welcome(
                rank=self._config.rank,
                pid=os.getpid(),
                device=self._config.device,
                node=self._config.node,
                held=tuple(self._held.values()),
                received=dict(self._received),
                host_bytes=self._host_bytes,
                memory=self._memory(),
                facts=self._facts,
            )
        )

    def _detach(self) -> None:
        self._writer = None
        self._driverless_since = asyncio.get_running_loop().time()
        self._forget_driver()

    def _forget_driver(self) -> None:
        self._compute.abandon_loads()
        for group_id, sequences in self._live.items():
            self._stale[group_id] = (*self._stale.get(group_id, ()), *sequences)
        self._live.clear()

    # ------------------------------------------------------------------ commands and reports

    def _on_command(self, command: Command) -> None:
        match command:
            case Exit():
                self._end(0)
                return
            case Hello():
                raise ValueError("a second hello")
            case Step():
                command = self._track(command)
            case ParkShard():
                live = self._live.pop(command.group_id, set())
                stale = self._stale.pop(command.group_id, ())
                released = tuple({*stale, *live, *command.released})
                command = msgspec.structs.replace(command, released=released)
            case UnloadShard():
                self._unloads[command.op] = command.group_id
            case _:
                pass
        if isinstance(command, LoadShard | UnloadShard | GrowKv | ParkShard | WakeShard | Step):
            self._received[command.group_id] = self._received.get(command.group_id, 0) + 1
        self._compute.submit(command)

    def _track(self, step: Step) -> Step:
        """Know the sequences of this driver; release those of the one before it with the first step of this one."""
        live = self._live.setdefault(step.group_id, set())
        live.difference_update(step.released)
        live.update(sequence.sequence for sequence in step.sequences)
        stale = self._stale.pop(step.group_id, ())
        return msgspec.structs.replace(step, released=(*stale, *step.released)) if stale else step

    def _on_report(self, report: Report) -> None:
        if isinstance(report, Done):
            if report.held is not None:
                self._held[report.held.group_id] = report.held
            group_id = self._unloads.pop(report.op, None)
            if group_id is not None:
                for table in (self._held, self._received, self._live, self._stale):
                    table.pop(group_id, None)
            report = msgspec.structs.replace(report, memory=self._memory())
        if isinstance(report, StepDone) and report.error:
            log.error("rank %d: step %d: %s", self._config.rank, report.step, report.error)
        self._send(report)

    def _send(self, report: Report) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(report))

    # ------------------------------------------------------------------ the end

    async def _watch(self) -> None:
        """No driver for too long, or no host: the memory belongs to somebody else now."""
        loop = asyncio.get_running_loop()
        host = self._config.host_pids[self._config.rank] if self._config.rank < len(self._config.host_pids) else None
        while True:
            await asyncio.sleep(0.25)
            if self._writer is None and loop.time() - self._driverless_since > self._config.grace_s:
                log.warning("rank %d: no driver for %.0f s, exiting", self._config.rank, self._config.grace_s)
                self._end(0)
            if os.getppid() != self._parent:
                log.warning("rank %d: what started it is gone, exiting", self._config.rank)
                self._end(1)
            if host is not None and not _alive(host):
                log.warning("rank %d: host process %d is gone, exiting", self._config.rank, host)
                self._end(1)

    def _tell_load(self, loop: asyncio.AbstractEventLoop) -> None:
        """What the device does is nice to know: a probe that fails ends the telling, and nothing else."""
        try:
            probe = self._make_load_probe()
            while not loop.is_closed():
                loop.call_soon_threadsafe(self._send, probe())
                time.sleep(LOAD_EVERY_S)
        except Exception:
            if not loop.is_closed():
                log.exception("rank %d: what its device does is not known any more", self._config.rank)

    def _on_fatal(self, trace: str) -> None:
        print(f"rank {self._config.rank}: {trace}", file=sys.stderr, flush=True)
        # One more turn of the loop, so that the report of what failed is on its way before the process ends.
        asyncio.get_running_loop().call_later(0.05, self._end, EXIT_FATAL)

    def _end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    def close(self) -> None:
        """Give all memory back; called after `serve`, not on a fatal end."""
        if not self._compute.stop(CLOSE_TIMEOUT_S):
            log.warning("rank %d: a step did not end in %.0f s, leaving it", self._config.rank, CLOSE_TIMEOUT_S)


async def _read(reader: asyncio.StreamReader) -> Command:
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES}")
    return decode_command(await reader.readexactly(length))


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in ("Z", "X")
    return False
