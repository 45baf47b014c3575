"""Where the servers of TensorRT-LLM models run: on the node of their first rank. Here, or through Ray (`ray_bundles`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from workers.driver.engine_processes import EngineProcesses

_T = TypeVar("_T")


@dataclass(frozen=True)
class Place:
    """The devices of one group."""

    devices: tuple[int, ...]  # of the server's own node, by rank; groups over nodes have ranks beyond them
    nodes: tuple[tuple[str, int], ...]  # (host, ranks there), the server's own first
    bundles: tuple[int, ...] = ()  # of the placement group, by rank
    placement_group: str = ""  # hex id
    ray_address: str = ""


class EngineSeat(Protocol):
    """See `EngineProcesses` for the calls; each is awaited off the loop."""

    async def place(self, ranks: Sequence[int]) -> Place: ...

    async def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], config: Mapping[str, Any]
    ) -> None: ...

    async def address(self, name: str) -> str: ...

    async def exit_code(self, name: str) -> int | None: ...

    async def log_tail(self, name: str) -> str: ...

    async def wait(self, name: str, timeout_s: float) -> bool: ...

    async def end(self, name: str, pids: Sequence[int], since: float) -> None: ...

    async def names(self) -> list[str]: ...

    async def run(self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> str: ...

    def for_rank(self, rank: int) -> EngineSeat:
        """The seat on the node of a rank."""
        ...

    @property
    def environment(self) -> Mapping[str, str]:
        """Of the node's processes, to take from."""
        ...


class LocalSeat:
    """Device `rank` of this machine is rank `rank`'s."""

    def __init__(self, directory: Path) -> None:
        self._processes = EngineProcesses(directory)

    async def place(self, ranks: Sequence[int]) -> Place:
        return Place(tuple(ranks), ((os.uname().nodename, len(ranks)),))

    async def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], config: Mapping[str, Any]) -> None:
        await asyncio.to_thread(self._processes.start, name, command, environment, config)

    async def address(self, name: str) -> str:
        return f"unix:{self._processes.socket(name)}"

    async def exit_code(self, name: str) -> int | None:
        return await asyncio.to_thread(self._processes.exit_code, name)

    async def log_tail(self, name: str) -> str:
        return await asyncio.to_thread(self._processes.log_tail, name)

    async def wait(self, name: str, timeout_s: float) -> bool:
        return await asyncio.to_thread(self._processes.wait, name, timeout_s)

    async def end(self, name: str, pids: Sequence[int], since: float) -> None:
        await asyncio.to_thread(self._processes.end, name, pids, since)

    async def names(self) -> list[str]:
        return await asyncio.to_thread(self._processes.names)

    async def run(self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> str:
        return await asyncio.to_thread(self._processes.run, command, environment, timeout_s)

    def for_rank(self, rank: int) -> EngineSeat:
        del rank
        return self

    @property
    def environment(self) -> Mapping[str, str]:
        return os.environ


SeatOf = Callable[[int], EngineSeat]
