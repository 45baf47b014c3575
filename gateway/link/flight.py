"""One attempt of one request: its sequences in flight on one pool, and what came back of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.api.proto.pool_pb2 import End, Hold, Tokens


@dataclass(frozen=True, slots=True)
class Lost:
    """The link went down: nothing more will come of any sequence."""

    reason: str


Event = tuple[int, Tokens | End | Hold | Lost]
"""(choice index, what happened); the index of Lost is -1."""


class Flight:
    """Written by the link, read by the one task that serves the request. All of a frame is one wakeup."""

    __slots__ = ("_inbox", "_waiter", "began")

    def __init__(self) -> None:
        self.began = False  # a token has come
        self._inbox: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None

    def push(self, index: int, event: Tokens | End | Hold | Lost) -> None:
        self._inbox.append((index, event))
        self.began = self.began or isinstance(event, Tokens)
        self.wake()

    def wake(self) -> None:
        """Lets `receive` return, with nothing if nothing came."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def receive(self) -> list[Event]:
        """All that came since the last call; waits for something to come."""
        if not self._inbox:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._inbox = self._inbox, []
        return events
