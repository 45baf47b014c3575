"""One attempt of one request: its sequences in flight on one pool, and what came back of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.api.proto.pool_pb2 import End, Hold, Tokens
from gateway.link.words import Words


@dataclass(frozen=True, slots=True)
class Lost:
    """The link went down: nothing more will come of any sequence."""

    reason: str  # a whole sentence


@dataclass(frozen=True, slots=True)
class Text:
    """What a server sends that answers in text. `tokens`: as many as it is known to be of; `stop_reason`: what ended it, with
    the last. One without either says that the server goes on, and is for the link only."""

    text: str
    tokens: int = 0
    stop_reason: str = ""


Event = tuple[int, Tokens | Text | End | Hold | Lost]
"""(choice index, what happened); the index of Lost is -1."""


class Flight:
    """Written by the link, read by the one task that serves the request. All of a frame is one wakeup.

    `on_computed(failed)` is called once nothing more will come of its sequences, whether or not what came was read. `words` are
    for servers that read text.
    """

    __slots__ = ("_failed", "_inbox", "_on_computed", "_open", "_waiter", "began", "words")

    def __init__(
        self, sequences: int = 1, on_computed: Callable[[bool], None] = lambda failed: None, words: Words | None = None
    ) -> None:
        self.began = False  # a token has come
        self.words = words or Words()
        self._open = sequences
        self._failed = False
        self._on_computed = on_computed
        self._inbox: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None

    def push(self, index: int, event: Tokens | Text | End | Hold | Lost) -> None:
        self._inbox.append((index, event))
        if isinstance(event, Tokens | Text):
            self.began = True
        elif isinstance(event, End | Lost):
            self._end(event)
        self.wake()

    def _end(self, event: End | Lost) -> None:
        if self._open == 0:
            return
        lost = isinstance(event, Lost)
        self._failed = self._failed or lost or event.finish_reason == "error" or bool(event.error_code)
        self._open = 0 if lost else self._open - 1
        if self._open == 0:
            self._on_computed(self._failed)

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
