"""One shard of a Redis Cluster as if it were one server: all keys of a site carry one hash tag, so one node owns them all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.crc import key_slot
from redis.exceptions import AskError, ConnectionError, MovedError, RedisError, TryAgainError

# What a node answers while the slot is somewhere else, or on its way there.
_ELSEWHERE = (MovedError, AskError, TryAgainError)


class _OwnerConnection(Connection):
    """Connects to whichever node owns the pool's slot now."""

    def __init__(self, *, owner_pool: OwnerPool, **options: Any) -> None:
        self._owner_pool = owner_pool
        super().__init__(**options)

    async def connect_check_health(self, *arguments: Any, **options: Any) -> None:
        if not self.is_connected:
            self.host, self.port = await self._owner_pool.owner()
        await super().connect_check_health(*arguments, **options)

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*arguments, **options)
        except _ELSEWHERE as error:
            await self.disconnect()  # the next command asks anew who the owner is
            raise ConnectionError(f"the cluster moved the site's keys to another node ({error})") from error


class _OwnerSSLConnection(_OwnerConnection, SSLConnection):
    pass


class OwnerPool(ConnectionPool):
    """Connections to the node that owns `slot`. `seeds` are nodes that know the cluster; one that answers is enough."""

    def __init__(self, seeds: Sequence[tuple[str, int]], slot: int, *, tls: bool, **options: Any) -> None:
        self._seeds = list(seeds)
        self._slot = slot
        self._seed_options = {**options, "ssl": tls}
        kind = _OwnerSSLConnection if tls else _OwnerConnection
        super().__init__(connection_class=kind, owner_pool=self, **options)

    async def owner(self) -> tuple[str, int]:
        """ConnectionError when no node of the cluster says who it is."""
        problems = []
        for host, port in list(self._seeds):
            try:
                ranges = await self._ask(host, port)
            except (RedisError, OSError, TimeoutError) as error:
                problems.append(f"{host}:{port}: {error}")
                continue
            nodes = [(_text(node[0]) or host, int(node[1])) for _, _, *members in ranges for node in members]
            self._seeds = list(dict.fromkeys([*self._seeds, *nodes]))
            for first, last, master, *_ in ranges:
                if first <= self._slot <= last:
                    return _text(master[0]) or host, int(master[1])
            problems.append(f"{host}:{port}: no node owns slot {self._slot}")
        raise ConnectionError(f"no owner of slot {self._slot}: {'; '.join(problems)}")

    async def _ask(self, host: str, port: int) -> list[list[Any]]:
        client = Redis(host=host, port=port, single_connection_client=True, **self._seed_options)
        try:
            ranges: Any = await client.execute_command("CLUSTER SLOTS", NEVER_DECODE=True)
            return ranges
        finally:
            await asyncio.shield(client.aclose())


def connect_cluster(seeds: Sequence[tuple[str, int]], site: str, *, tls: bool, **options: Any) -> Redis:
    """A client of the node that holds the site's keys, wherever the cluster moves them."""
    slot = key_slot(f"{{modelyard:{site}}}".encode())
    return Redis.from_pool(OwnerPool(seeds, slot, tls=tls, **options))


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
