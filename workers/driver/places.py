"""The devices of a pool without rank processes of ours: only engines with processes of their own compute in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import psutil

from workers.messages import Welcome


@runtime_checkable
class Places(Protocol):
    """A `RankLauncher` that starts no ranks. `on_lost` is told, on the loop, when a device is gone."""

    on_lost: Callable[[str], None]

    def welcomes(self) -> dict[int, Welcome]:
        """As ranks would say it of themselves; empty while the devices are not held."""
        ...


class LocalPlaces:
    """The `RankLauncher` of such a pool without Ray: there is nothing to start."""

    def __init__(self, devices: int, device: str) -> None:
        self._devices = devices
        self._device = device
        self.on_lost: Callable[[str], None] = lambda reason: None

    async def find(self) -> list[str] | None:
        return []

    async def start(self) -> list[str]:
        return []

    async def stop(self) -> None:
        return

    def welcomes(self) -> dict[int, Welcome]:
        node, pid = os.uname().nodename, os.getpid()
        host = psutil.virtual_memory().available
        return {rank: Welcome(rank, pid, self._device, node, (), host_bytes=host) for rank in range(self._devices)}
