"""The servers of a pool's TensorRT-LLM models through Ray: started by the actor that holds the bundle of their first rank."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from gateway.api.errors import unavailable
from workers.driver.engine_processes import RUN_TIMEOUT_S
from workers.driver.engine_seats import EngineSeat, Place
from workers.driver.rank_host import HostDescription, host_name
from workers.driver.ray_ranks import ACTOR_TIMEOUT_S, actor_of, call_hosts, placement_group_of


class RaySeat:
    """The `EngineSeat` beside the device of one rank. Actors are found by name at each call: they may have been made anew."""

    def __init__(self, pool: str, rank: int = 0) -> None:
        self._pool = pool
        self._rank = rank

    async def place(self, ranks: Sequence[int]) -> Place:
        return await asyncio.to_thread(self._place, ranks)

    async def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], config: Mapping[str, Any]) -> None:
        host = await asyncio.to_thread(self._describe, self._rank)
        listen = "" if _is_here(host) else host.node_ip
        await self._call("start", name, list(command), dict(environment), {**config, "listen_host": listen})

    async def address(self, name: str) -> str:
        if _is_here(await asyncio.to_thread(self._describe, self._rank)):
            return f"unix:{await self._call('socket', name)}"
        return f"tcp:{await self._call('endpoint', name) or ':0'}"

    async def exit_code(self, name: str) -> int | None:
        return await self._call("exit_code", name)

    async def log_tail(self, name: str) -> str:
        return await self._call("log_tail", name)

    async def wait(self, name: str, timeout_s: float) -> bool:
        return await self._call("wait", name, timeout_s, limit_s=timeout_s + ACTOR_TIMEOUT_S)

    async def end(self, name: str, pids: Sequence[int], since: float) -> None:
        await self._call("end", name, list(pids), since)

    async def names(self) -> list[str]:
        return await self._call("names")

    async def run(self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float = RUN_TIMEOUT_S) -> str:
        return await self._call("run", list(command), dict(environment), timeout_s, limit_s=timeout_s + ACTOR_TIMEOUT_S)

    def for_rank(self, rank: int) -> EngineSeat:
        return RaySeat(self._pool, rank)

    @property
    def environment(self) -> Mapping[str, str]:
        return os.environ

    async def _call(self, method: str, *arguments: object, limit_s: float = ACTOR_TIMEOUT_S) -> Any:
        """Of the `EngineProcesses` beside the device."""
        return await asyncio.to_thread(self._call_now, method, arguments, limit_s)

    # ------------------------------------------------------------------ on a thread

    def _call_now(self, method: str, arguments: Sequence[object], limit_s: float) -> Any:
        return call_hosts([self._host(self._rank)], "engine", method, *arguments, timeout_s=limit_s)[0]

    def _host(self, rank: int) -> Any:
        host = actor_of(host_name(self._pool, rank))
        if host is None:
            raise unavailable(f"pool `{self._pool}`: device {rank} is not held yet, or not any more")
        return host

    def _describe(self, rank: int) -> HostDescription:
        return call_hosts([self._host(rank)], "describe")[0]

    def _place(self, ranks: Sequence[int]) -> Place:
        described: list[HostDescription] = call_hosts([self._host(rank) for rank in ranks], "describe")
        here = described[0].node_id
        group = placement_group_of(self._pool)
        return Place(
            devices=tuple(_device(host) for host in described if host.node_id == here),
            nodes=tuple(Counter(host.node_ip for host in described).items()),
            bundles=tuple(ranks),
            placement_group=group.id.hex() if group is not None else "",
            ray_address=ray.get_runtime_context().gcs_address,
        )


def _is_here(host: HostDescription) -> bool:
    return host.node_id == ray.get_runtime_context().get_node_id()


def _device(host: HostDescription) -> int:
    if len(host.gpu_ids) != 1 or not host.gpu_ids[0].isdigit():
        raise unavailable(
            f"node {host.node_name}: Ray calls its GPU {', '.join(host.gpu_ids) or 'nothing'}; TensorRT-LLM needs indices, so "
            "start Ray with CUDA_VISIBLE_DEVICES unset or of numbers (no UUIDs, no MIG)"
        )
    return int(host.gpu_ids[0])
