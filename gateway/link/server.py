"""The contract between a link to a server that runs elsewhere and the protocol which that server speaks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from gateway.api.errors import ErrorCode, YardError
from gateway.api.proto.pool_pb2 import End, Submit, Tokens
from gateway.link.flight import Text
from gateway.link.words import Words

Answer = AsyncGenerator[Text | Tokens | End, None]
"""What comes of one sequence; an End is its last. Closing it ends the request at the server."""


class Unreachable(YardError):
    """Nobody answers at the server's address."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, message, retry_after_s=2.0)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server says of its model. `context` 0: not known."""

    context: int = 0


class Server(Protocol):
    """YardError of both calls says what is wrong and what to do; Unreachable where nobody listens."""

    async def look(self) -> Facts:
        """Whether it is there and has the model. Quick, and costs it nothing."""
        ...

    def answer(self, submit: Submit, words: Words) -> Answer: ...

    async def close(self) -> None: ...
