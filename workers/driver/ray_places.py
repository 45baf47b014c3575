"""The devices of a pool without rank processes, held through Ray: a bundle each, with the same actor as ranks have.

An actor ends itself when no driver has attended to it for the pool's grace.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError

from gateway.api.config import PoolSpec
from gateway.api.errors import YardError, unavailable
from workers.driver.rank_host import HostDescription
from workers.driver.ray_ranks import RayRanks, call_hosts
from workers.messages import Welcome
from workers.rank.config import RankConfig


class RayPlaces(RayRanks):
    """`on_lost` is told, on the loop, when an actor is gone: its devices are."""

    def __init__(self, config: RankConfig, spec: PoolSpec, cpus: float = 1.0) -> None:
        """`cpus`: of each bundle. Actors here take none of them: they are for ranks of engines that are Ray actors too."""
        super().__init__(config, spec)
        self._cpus = cpus
        self.on_lost: Callable[[str], None] = lambda reason: None
        self._described: list[HostDescription] = []
        self._attending = threading.Event()

    async def find(self) -> list[str] | None:
        """No addresses: there are no ranks to connect. None when the actors have to be made."""
        hosts = await asyncio.to_thread(self._living_hosts)
        if hosts is None:
            return None
        await self._use(hosts)
        return []

    async def start(self) -> list[str]:
        self._attending.clear()
        try:
            hosts = await asyncio.to_thread(lambda: self._living_hosts() or self._new_hosts())
        except RayError as error:
            raise unavailable(f"pool `{self._config.pool}`: Ray does not answer: {error}") from error
        await self._use(hosts)
        return []

    async def stop(self) -> None:
        self._attending.clear()
        await super().stop()

    def welcomes(self) -> dict[int, Welcome]:
        return {
            rank: Welcome(rank, host.pid, self._config.device, host.node_name, (), host_bytes=host.free_bytes)
            for rank, host in enumerate(self._described)
        }

    @property
    def _host_cpus(self) -> float:
        return 0.0

    def _bundle(self) -> dict[str, float]:
        return {**super()._bundle(), "CPU": self._cpus}

    async def _use(self, hosts: list[Any]) -> None:
        self._described = await asyncio.to_thread(call_hosts, hosts, "describe")
        self._attending = threading.Event()
        self._attending.set()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._attend, args=(hosts, self._attending, loop), name="attend", daemon=True).start()

    def _attend(self, hosts: list[Any], attending: threading.Event, loop: asyncio.AbstractEventLoop) -> None:
        pause = threading.Event()
        while attending.is_set():
            try:
                call_hosts(hosts, "attend", self._config.grace_s)
            except YardError as error:
                if attending.is_set():
                    attending.clear()
                    loop.call_soon_threadsafe(self.on_lost, error.message)
                return
            pause.wait(min(1.0, self._config.grace_s / 4))
