"""What a request needs of a link, whatever is at its other end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.api.proto.pool_pb2 import Submit
from gateway.link.flight import Flight


class Load(Protocol):
    def sequences(self, model: str) -> int: ...

    def waiting(self, model: str) -> int: ...


class Link(Protocol):
    """One that carries requests to a pool (`PoolLink`), or to a server that runs elsewhere (`ServerLink`)."""

    @property
    def pool(self) -> str: ...

    @property
    def up(self) -> bool: ...

    @property
    def reason(self) -> str: ...

    @property
    def updates(self) -> int: ...

    @property
    def load(self) -> Load: ...

    @property
    def is_stuck(self) -> bool: ...

    @property
    def in_flight(self) -> int: ...

    def ready_groups(self, model: str) -> int: ...

    def outstanding_tokens(self, model: str) -> int: ...

    def submit(self, flight: Flight, submits: Sequence[Submit]) -> list[int]: ...

    def cancel(self, ids: Sequence[int]) -> None: ...

    def stop(self, sequence: int) -> None: ...
