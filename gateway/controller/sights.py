"""Remembers since when things are as they are, so that the decision itself needs no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from gateway.api.records import PoolRecord
from gateway.controller.pool_digest import runs
from gateway.controller.situation import AppSight, Emit, Observed, PoolSight
from gateway.state.view import PoolEntry

FORGET_S = 600.0


class Sights:
    """Owned by the controller's loop. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._records: dict[str, PoolRecord] = {}
        self._seen: dict[str, float] = {}  # pool -> when its record was there last
        self._lost: set[str] = set()
        self._dead: dict[tuple[str, int], float] = {}  # (pool, rank) -> when it was first reported dead
        self._apps: dict[str, tuple[str, str, float]] = {}  # pool -> (status, deployment, since)
        self._closing: dict[str, float] = {}

    def look(
        self,
        pools: Mapping[str, PoolRecord],
        apps: Mapping[str, AppSight],
        devices_held: frozenset[str],
        desired: Mapping[str, PoolEntry],
    ) -> tuple[Observed, list[Emit]]:
        """What is observed now, and what happened to pools since the last look."""
        now = self._clock()
        events = self._look_at_pools(pools, now)
        for name in sorted(self._records.keys() - pools.keys() - self._lost):
            self._lost.add(name)
            events.append(Emit("pool.lost", f"Pool/{name}", "its driver's heartbeat expired"))
        for name in [name for name, seen in self._seen.items() if now - seen > FORGET_S]:
            del self._records[name], self._seen[name]
            self._lost.discard(name)
        sights = {
            name: PoolSight(
                record,
                missing_s=0.0 if name in pools else max(now - self._seen[name], 0.001),
                dead_s={rank: now - since for (pool, rank), since in self._dead.items() if pool == name},
            )
            for name, record in self._records.items()
        }
        aged = {name: self._age(name, app, desired.get(name), now) for name, app in apps.items()}
        self._apps = {name: known for name, known in self._apps.items() if name in apps}
        self._closing = {name: since for name, since in self._closing.items() if name in apps}
        return Observed(sights, aged, devices_held, now - self._since), events

    def _look_at_pools(self, pools: Mapping[str, PoolRecord], now: float) -> list[Emit]:
        events = []
        for name, record in pools.items():
            before = self._records.get(name)
            if before is None:
                events.append(Emit("pool.up", f"Pool/{name}", f"{len(record.ranks)} ranks, driver at {record.endpoint}"))
            elif before.incarnation != record.incarnation:
                events.append(Emit("pool.restarted", f"Pool/{name}", f"its driver is new, at {record.endpoint}"))
            elif name in self._lost:
                events.append(Emit("pool.back", f"Pool/{name}", f"its driver at {record.endpoint} is heard again"))
            self._lost.discard(name)
            self._records[name], self._seen[name] = record, now
            dead = {rank.index for rank in record.ranks if not rank.alive}
            self._dead = {key: since for key, since in self._dead.items() if key[0] != name or key[1] in dead}
            for rank in dead:
                self._dead.setdefault((name, rank), now)
        return events

    def _age(self, name: str, app: AppSight, desired: PoolEntry | None, now: float) -> AppSight:
        known = self._apps.get(name)
        since = known[2] if known and known[:2] == (app.status, app.deployment) else now
        self._apps[name] = (app.status, app.deployment, since)
        if desired is not None and runs(app.deployment, desired.spec):
            self._closing.pop(name, None)
            return replace(app, age_s=now - since)
        closing = self._closing.setdefault(name, now)
        return replace(app, age_s=now - since, closing_s=now - closing)
