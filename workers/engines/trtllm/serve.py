"""`boot.py serve CONFIG`: the server of one model. A loop on a thread talks to the driver; the main thread does what blocks.

CONFIG is a JSON file that only this user can read: socket, secret, grace_s. It is removed once it is read. Without a driver for
`grace_s` the server shuts its model down and ends, so that nothing holds a GPU that nobody asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import platform
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workers.engines.trtllm.gpu_memory import Meter, Nvml
from workers.engines.trtllm.messages import (
    DOWN,
    MAX_FRAME_BYTES,
    NONCE_BYTES,
    PROTOCOL,
    Beat,
    Cancel,
    Done,
    Generate,
    GetStats,
    Hello,
    Load,
    Message,
    Park,
    Progress,
    Shutdown,
    Wake,
    Welcome,
    decode,
    encode,
    proof,
)
from workers.engines.trtllm.model import Model
from workers.engines.trtllm.streams import Streams

log = logging.getLogger(__name__)

BEAT_S = 2.0
HELLO_TIMEOUT_S = 30.0
END_TIMEOUT_S = 30.0
STILL_LOADING_S = 5.0
EXIT_LOST = 70


class Server:
    def __init__(self, socket: str, secret: str, grace_s: float, listen_host: str, endpoint: str) -> None:
        """`listen_host`: also listen there over TCP, for a driver on another node; host:port goes to the file `endpoint`."""
        self._socket = socket
        self._listen_host = listen_host
        self._endpoint = endpoint
        self._secret = secret
        self._grace_s = grace_s
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # for the main thread
        self._loop = asyncio.new_event_loop()
        self._streams = Streams(self._send, self._lost)
        self._model: Model | None = None
        self._meter: Meter | None = None
        self._load: Load | None = None
        self._state = "empty"
        self._writer: asyncio.StreamWriter | None = None
        self._driverless_since = time.monotonic()
        self._aborts: set[asyncio.Task[None]] = set()
        self._device_bytes: list[int] = []
        self._pids: list[int] = []
        self._ending = False

    def run(self) -> None:
        """Until the model is to end. The main thread's own."""
        threading.Thread(target=self._turn, name="loop", daemon=True).start()
        while (job := self._jobs.get()) is not None:
            job()
        if self._model is not None and self._state != "failed":
            self._model.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)

    # ------------------------------------------------------------------ the loop's thread

    def _turn(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._loop.run_forever()

    async def _listen(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._socket)
        previous = os.umask(0o177)
        try:
            await asyncio.start_unix_server(self._on_connection, path=self._socket)
        finally:
            os.umask(previous)
        if self._listen_host:
            server = await asyncio.start_server(self._on_connection, self._listen_host, 0)
            host, port = server.sockets[0].getsockname()[:2]
            self._write_endpoint(f"{host}:{port}")
        self._watching = self._loop.create_task(self._watch(), name="watch")

    def _write_endpoint(self, address: str) -> None:
        Path(self._endpoint).write_text(address)

    async def _watch(self) -> None:
        while not self._ending:
            await asyncio.sleep(BEAT_S)
            self._send(Beat(self._streams.in_flight, self._streams.iteration))
            if self._writer is None and time.monotonic() - self._driverless_since > self._grace_s:
                log.warning("no driver for %.0f s: ending", self._grace_s)
                self._end()

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            nonce = secrets.token_hex(NONCE_BYTES // 2)
            writer.write(nonce.encode())
            hello = await asyncio.wait_for(_read(reader), HELLO_TIMEOUT_S)
            if not isinstance(hello, Hello) or not hmac.compare_digest(hello.proof, proof(self._secret, nonce)):
                log.warning("refused a connection without the pool's secret")
                return
            if hello.protocol != PROTOCOL:
                log.warning("refused a driver of protocol %d, mine is %d", hello.protocol, PROTOCOL)
                return
            self._attach(writer)
            while True:
                self._on_message(await _read(reader))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.TimeoutError):  # noqa: UP041 - of Python 3.10
            pass
        except ValueError as error:
            log.warning("closing a connection: %s", error)
        finally:
            if self._writer is writer:
                self._writer = None
                self._driverless_since = time.monotonic()
                self._cancel(None)
            writer.close()

    def _attach(self, writer: asyncio.StreamWriter) -> None:
        """The newest driver wins; what the one before it asked for is cancelled."""
        if self._writer is not None:
            self._writer.close()
            self._cancel(None)
        self._writer = writer
        version = self._model.version if self._model else ""
        held = self._load.held if self._load else ""
        python = platform.python_version()
        self._send(Welcome(os.getpid(), python, self._state, held, version, self._device_bytes, self._pids))

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Generate):
            self._generate(message)
        elif isinstance(message, Cancel):
            self._cancel(message.sequences)
        elif isinstance(message, Load):
            self._begin(message.op, "empty", "loading", lambda: self._construct(message))
        elif isinstance(message, Park):
            if self._streams.in_flight:  # rule 5; the driver waits for them, so this is a defect
                self._send(Done(message.op, f"{self._streams.in_flight} requests are in flight"))
            else:
                self._begin(message.op, "ready", "parking", lambda: self._move(message.op, "release", "parked", "ready"))
        elif isinstance(message, Wake):
            self._begin(message.op, "parked", "waking", lambda: self._move(message.op, "resume", "ready", "parked"))
        elif isinstance(message, GetStats):
            self._jobs.put(lambda: self._report_stats(message.op))
        elif isinstance(message, Shutdown):
            self._end()
        else:
            raise ValueError(f"an unexpected {type(message).__name__}")

    def _begin(self, op: int, needed: str, state: str, job: Callable[[], None]) -> None:
        if self._state != needed:
            self._send(Done(op, f"the model is {self._state}, not {needed}"))
            return
        self._state = state
        self._jobs.put(job)

    def _generate(self, request: Generate) -> None:
        if self._model is None or self._state != "ready":
            raise ValueError(f"a request while the model is {self._state}")
        self._streams.start(self._model, request)

    def _cancel(self, sequences: list[int] | None) -> None:
        """None: all."""
        if self._model is None:
            return
        tasks = self._streams.cancel_all(self._model) if sequences is None else self._streams.cancel(self._model, sequences)
        for task in tasks:
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    def _lost(self, reason: str) -> None:
        """The engine is gone: so is this process, and the driver restarts the group as one (rule 11)."""
        log.error("the engine is lost: %s", reason)
        os._exit(EXIT_LOST)

    def _send(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(message))

    def _end(self) -> None:
        self._ending = True
        self._state = "ending"
        self._jobs.put(None)

    # ------------------------------------------------------------------ the main thread

    def _construct(self, load: Load) -> None:
        began = time.monotonic()
        step = ["importing tensorrt_llm", 0.0]
        done = threading.Event()

        def progress(fraction: float, what: str) -> None:
            step[:] = [what, fraction]
            self._call(self._send, Progress(load.op, fraction, what))

        def still() -> None:
            """The library says nothing for minutes; that time passes is said."""
            while not done.wait(STILL_LOADING_S):
                self._call(self._send, Progress(load.op, float(step[1]), f"{step[0]}, {time.monotonic() - began:.0f} s"))

        threading.Thread(target=still, name="still", daemon=True).start()
        self._load = load
        notes: list[str] = []
        try:
            self._meter = _meter(load.devices, notes)
            model = Model(load, self._loop, progress)
        except BaseException as error:  # the driver is told, and ends this process
            log.exception("loading failed")
            self._call(self._finish, "failed", Done(load.op, f"{type(error).__name__}: {error}"))
            return
        finally:
            done.set()
        self._model = model
        self._finish_measured("ready", Done(load.op, version=model.version, seconds=time.monotonic() - began, notes=notes))

    def _move(self, op: int, method: str, then: str, before: str) -> None:
        began = time.monotonic()
        assert self._model is not None
        if self._meter is not None:
            self._meter.begin()
        try:
            getattr(self._model, method)()
        except Exception as error:  # the library's; a release that failed may have left anything
            log.exception("%s failed", method)
            state = before if isinstance(error, NotImplementedError) else "failed"
            self._call(self._finish, state, Done(op, f"{method} failed: {type(error).__name__}: {error}"))
            return
        self._finish_measured(then, Done(op, seconds=time.monotonic() - began))

    def _finish_measured(self, state: str, done: Done) -> None:
        if self._meter is not None:
            done.device_bytes, done.pids = self._meter.end()
        self._call(self._finish, state, done)

    def _report_stats(self, op: int) -> None:
        try:
            stats = self._model.stats() if self._model is not None and self._state == "ready" else []
        except Exception as error:  # noqa: BLE001 - statistics are no reason to end
            self._call(self._send, Done(op, f"{type(error).__name__}: {error}"))
            return
        self._call(self._send, Done(op, stats=stats[-1:]))

    def _finish(self, state: str, done: Done) -> None:
        """On the loop."""
        self._state = state if not self._ending else self._state
        if done.device_bytes:
            self._device_bytes, self._pids = done.device_bytes, done.pids
        self._send(done)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)


def _meter(devices: list[int], notes: list[str]) -> Meter | None:
    try:
        meter = Meter(Nvml(), devices)
        meter.begin()
    except (ImportError, RuntimeError) as error:
        notes.append(f"GPU memory cannot be measured ({error}); what was planned is taken for it")
        return None
    return meter


async def _read(reader: asyncio.StreamReader) -> Any:
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES}")
    return decode(await reader.readexactly(length), DOWN)


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s")
    path = Path(arguments[0])
    config = json.loads(path.read_text())
    path.unlink()
    Server(config["socket"], config["secret"], float(config["grace_s"]), config.get("listen_host", ""), config["endpoint"]).run()
    with contextlib.suppress(OSError):
        Path(config["socket"]).unlink()
    sys.stdout.flush()
    # The library's exit handlers may wait for ranks that are gone; a process that does not end holds the GPU.
    last = threading.Timer(END_TIMEOUT_S, os._exit, (0,))
    last.daemon = True
    last.start()
    return 0
