"""The driver's connection to the server of one TensorRT-LLM model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from gateway.api.errors import unavailable
from workers.driver.rank_link import dial
from workers.engines.trtllm.messages import (
    MAX_FRAME_BYTES,
    NONCE_BYTES,
    PROTOCOL,
    UP,
    Done,
    Hello,
    Message,
    Welcome,
    decode,
    encode,
    proof,
)

HANDSHAKE_TIMEOUT_S = 60.0
SILENT_S = 120.0
"""Without even a beat for so long, the server's loop does not turn any more (rule 11). Imports hold it up for many seconds."""


class EngineLink:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, welcome: Welcome) -> None:
        self.welcome = welcome
        self._reader = reader
        self._writer = writer
        self._ops: dict[int, asyncio.Future[Done]] = {}
        self._next_op = 1
        self._lost = ""

    @property
    def is_lost(self) -> bool:
        return bool(self._lost) or self._writer.is_closing()

    def send(self, message: Message) -> None:
        """Never waits. A connection that is gone is found by `read`."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def ask(self, make: Callable[[int], Message], timeout_s: float) -> Done:
        """Send an operation and wait for its end. YardError when it failed, took too long, or the server is lost."""
        if self._lost:
            raise unavailable(self._lost)
        op = self._next_op
        self._next_op += 1
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._ops[op] = future
        try:
            self.send(make(op))
            async with asyncio.timeout(timeout_s):
                done = await future
        except TimeoutError as error:
            raise unavailable(f"its server did not answer in {timeout_s:.0f} s") from error
        finally:
            del self._ops[op]
        if done.error:
            raise unavailable(done.error)
        return done

    async def read(self, on_message: Callable[[Any], None]) -> str:
        """Until the server is lost; how."""
        try:
            while True:
                async with asyncio.timeout(SILENT_S):
                    message = await _read(self._reader)
                if isinstance(message, Done):
                    future = self._ops.get(message.op)
                    if future is not None and not future.done():
                        future.set_result(message)
                else:
                    on_message(message)
        except TimeoutError:
            self._lost = f"its server said nothing for {SILENT_S:.0f} s"
        except (asyncio.IncompleteReadError, ConnectionError):
            self._lost = "its server is gone"
        except ValueError as error:
            self._lost = f"its server sent what is no message: {error}"
        for future in self._ops.values():
            if not future.done():
                future.set_exception(unavailable(self._lost))
        self.close()
        return self._lost

    def close(self) -> None:
        self._writer.close()


async def connect(address: str, secret: str, driver: str) -> EngineLink:
    """YardError when nobody listens there, or it is not a server of this pool."""
    try:
        reader, writer = await dial(address)
    except OSError as error:
        raise unavailable(f"no server listens at {address}: {error}") from error
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            nonce = (await reader.readexactly(NONCE_BYTES)).decode()
            writer.write(encode(Hello(proof(secret, nonce), driver)))
            welcome = await _read(reader)
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
        writer.close()
        raise unavailable(f"the server at {address} does not welcome this driver: {error!r}") from error
    if not isinstance(welcome, Welcome) or welcome.protocol != PROTOCOL:
        writer.close()
        raise unavailable(f"the server at {address} speaks another protocol; restart the pool's models")
    return EngineLink(reader, writer, welcome)


async def _read(reader: asyncio.StreamReader) -> Any:
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES}")
    return decode(await reader.readexactly(length), UP)
