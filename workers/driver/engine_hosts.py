"""All TensorRT-LLM worker groups of a pool: the driver's commands to them, and what they report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from gateway.api.config import ModelSpec
from gateway.api.errors import YardError
from workers.driver.engine_host import EngineHost, Reports
from workers.driver.engine_runtime import EngineRuntime
from workers.driver.engine_seats import EngineSeat
from workers.engines.trtllm.messages import Cancel, Generate
from workers.messages import Command, HeldShard, LoadShard, ParkShard, UnloadShard, WakeShard

log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


class EngineHosts:
    """The commands of one operation come one a rank and are carried out together, once all are there."""

    def __init__(
        self, runtime: EngineRuntime, reports: Reports, spawn: Spawn, *, secret: str, driver: str, devices: int, grace_s: float
    ) -> None:
        self.runtime = runtime
        self._reports = reports
        self._spawn = spawn
        self._secret = secret
        self._driver = driver
        self._devices = devices
        self._grace_s = grace_s
        self._hosts: dict[int, EngineHost] = {}
        self._ranks: dict[int, tuple[int, ...]] = {}
        self._gathered: dict[int, dict[int, Any]] = {}  # op -> rank -> command

    def take(self, rank: int, command: Command) -> bool:
        """Whether it is for a group of ours."""
        if isinstance(command, LoadShard):
            if ModelSpec.model_validate_json(command.spec_json).engine != "trtllm":
                return False
            self._ranks[command.group_id] = command.ranks
        if not isinstance(command, LoadShard | UnloadShard | ParkShard | WakeShard) or command.group_id not in self._ranks:
            return False
        gathered = self._gathered.setdefault(command.op, {})
        gathered[rank] = command
        ranks = self._ranks[command.group_id]
        if len(gathered) == len(ranks):
            del self._gathered[command.op]
            self._carry_out(command.group_id, {rank: gathered[rank] for rank in ranks})
        return True

    def to_engine(self, group_id: int, message: Generate | Cancel) -> None:
        if host := self._hosts.get(group_id):
            host.send(message)

    def drop(self, group_id: int) -> None:
        if host := self._hosts.get(group_id):
            host.drop()

    async def adopt(self) -> dict[int, list[HeldShard]]:
        """What servers of an earlier driver hold, by rank. Those that cannot be taken over are ended."""
        found: dict[int, list[HeldShard]] = {}
        for name, seat in (await self._servers()).items():
            group_id = int(name[1:])
            host = self._host(group_id, seat)
            try:
                held = await host.adopt()
            except (YardError, ValueError) as error:
                log.warning("server %s of an earlier driver cannot be taken over (%s): ending it", name, error)
                await seat.end(name, (), 0.0)
                continue
            self._hosts[group_id] = host
            for rank, shard in held.items():
                self._ranks[group_id] = shard.ranks
                found.setdefault(rank, []).append(shard)
        return found

    async def _servers(self) -> dict[str, EngineSeat]:
        """Those that live, each with a seat on its node."""
        found: dict[str, EngineSeat] = {}
        for rank in range(self._devices):
            seat = self.runtime.seat.for_rank(rank)
            with contextlib.suppress(YardError):  # nobody holds the device: nothing runs on it
                for name in await seat.names():
                    found.setdefault(name, seat)
        return found

    def leave(self) -> None:
        """The servers stay for the next driver."""
        for host in self._hosts.values():
            host.leave()

    async def end(self) -> None:
        """The pool is deleted."""
        self.leave()
        for group_id, ranks in self._ranks.items():
            if group_id in self._hosts:
                await self.runtime.seat.for_rank(ranks[0]).end(f"e{group_id}", (), 0.0)

    def _carry_out(self, group_id: int, commands: Mapping[int, Any]) -> None:
        first = next(iter(commands.values()))
        ops = {rank: command.op for rank, command in commands.items()}
        if isinstance(first, LoadShard):
            host = self._hosts[group_id] = self._host(group_id, self.runtime.seat.for_rank(first.ranks[0]))
            host.load(commands)
            return
        if isinstance(first, UnloadShard):
            del self._ranks[group_id]
            self._hosts.pop(group_id).unload(ops)
            return
        host = self._hosts[group_id]
        if isinstance(first, ParkShard):
            host.park(ops)
        else:
            host.wake(ops)

    def _host(self, group_id: int, seat: EngineSeat) -> EngineHost:
        return EngineHost(self.runtime, seat, group_id, self._reports, self._secret, self._driver, self._grace_s, self._spawn)
