"""The page `/capacity` and the JSON below it: what lies in every device's memory, what routes lead to, what waits and why.

Read-only. All of it is what this gateway knows anyway, but for the past events, which are read from Redis at most every
EVENTS_EVERY_S however many look.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from gateway.api.records import GroupRecord, PoolRecord, RankRecord
from gateway.servers.admin_guard import AdminAccess
from gateway.servers.generation_path import GenerationPath
from gateway.state.connection import LOST
from gateway.state.history import History

EVENTS_EVERY_S = 2.0
EVENTS = 300
_SWITCHES = ("model.wake", "model.park", "model.loaded", "model.ready", "model.parked", "route.switched", "route.rolled_back")
_CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


class Capacity:
    """`history` None: without past events."""

    def __init__(self, site: str, path: GenerationPath, access: AdminAccess, history: History | None) -> None:
        self._site = site
        self._path = path
        self._access = access
        self._history = history
        self._events: list[dict[str, Any]] = []
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    def routes(self) -> list[Route]:
        return [
            Route("/capacity", self.page, methods=["GET"]),
            Route("/capacity.json", self.json, methods=["GET"]),
        ]

    async def page(self, request: Request) -> Response:
        """Holds nothing of the site, so it is everybody's; it asks for a key where the JSON does."""
        text = files("gateway.servers").joinpath("capacity.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"content-security-policy": _CONTENT_POLICY, "x-frame-options": "DENY"})

    async def json(self, request: Request) -> Response:
        self._access.check(request.headers.items(), "operate")
        return JSONResponse({**self.snapshot(), "events": await self._past()}, headers={"cache-control": "no-store"})

    def snapshot(self) -> dict[str, Any]:
        view = self._path.view
        return {
            "site": self._site,
            "time_unix": time.time(),
            "revision": view.revision,
            "degraded": view.degraded_reason if view.degraded else "",
            "controller": view.controller is not None,
            "pools": [_pool(view.pools[name]) for name in sorted(view.pools)],
            "missing_pools": sorted(set(view.desired_pools) - set(view.pools)),
            "routes": self._routes(),
            "queued": self._path.gate.waiting,
            "waiting": self._waiting(),
        }

    def _routes(self) -> list[dict[str, Any]]:
        view = self._path.view
        return [
            {
                "name": route.name,
                "generation": route.generation,
                "aliases": list(route.aliases),
                "targets": [
                    {"model": model, "weight": weight, "ready_groups": self._ready_groups(model)}
                    for model, weight in route.targets
                ],
            }
            for _, route in sorted(view.routes.items())
        ]

    def _ready_groups(self, model: str) -> int:
        server = self._path.links.server(model)
        return server.ready_groups(model) if server is not None else self._path.view.ready_groups(model)

    def _waiting(self) -> list[dict[str, str]]:
        """What is not as it should be, and why."""
        view = self._path.view
        found = [
            {
                "what": f"model {group.model}",
                "where": f"pool {pool.pool}",
                "state": group.residency or group.state,
                "why": group.reason,
            }
            for pool in view.pools.values()
            for group in pool.groups
            if group.state not in ("ready", "parked") or group.residency in ("waking", "parking")
        ]
        found += [
            {"what": f"model {record.model}", "where": "elsewhere", "state": record.state, "why": record.reason}
            for record in self._path.links.servers()
            if record.state != "ready"
        ]
        unplaced: Mapping[str, tuple[str, ...]] = view.controller.unplaced if view.controller else {}
        found += [
            {"what": f"model {model}", "where": "nowhere", "state": "unplaced", "why": "; ".join(reasons)}
            for model, reasons in sorted(unplaced.items())
        ]
        found += [
            {"what": f"pool {pool.pool}", "where": pool.node, "state": "not serving", "why": pool.message}
            for pool in view.pools.values()
            if pool.message
        ]
        return found

    async def _past(self) -> list[dict[str, Any]]:
        """Oldest first; what was read last when Redis does not answer."""
        if self._history is None:
            return []
        async with self._reading:
            if time.monotonic() - self._read_at >= EVENTS_EVERY_S:
                self._read_at = time.monotonic()
                try:
                    past = [event async for event in self._history.read(EVENTS, follow=False)]
                except LOST:
                    return self._events
                self._events = [
                    {"time_unix": event.time_unix, "kind": event.kind, "subject": event.subject, "message": event.message}
                    for event in past
                    if event.kind in _SWITCHES
                ]
        return self._events


def _pool(pool: PoolRecord) -> dict[str, Any]:
    return {
        "pool": pool.pool,
        "device": pool.device,
        "node": pool.node,
        "message": pool.message,
        "held": pool.held,
        "ranks": [_rank(rank) for rank in pool.ranks],
        "groups": [_group(group) for group in pool.groups],
        "switches": [
            {
                "path": switch.path,
                "count": switch.count,
                "last_s": switch.last_s,
                "median_s": switch.median_s,
                "longest_s": switch.longest_s,
                "bytes": switch.bytes,
                "link_share": switch.link_share,
            }
            for switch in pool.switches
        ],
    }


def _rank(rank: RankRecord) -> dict[str, Any]:
    return {
        "rank": rank.index,
        "node": rank.node,
        "type": rank.type,
        "alive": rank.alive,
        "trouble": rank.trouble,
        "capacity_bytes": rank.capacity_bytes,
        "free_bytes": max(rank.capacity_bytes - sum(size for *_, size in rank.ledger), 0),
        "utilization": rank.utilization,
        "device_used_bytes": rank.used_bytes,
        "device_total_bytes": rank.total_bytes,
        "ledger": [{"model": model, "kind": kind, "bytes": size} for model, kind, size in rank.ledger],
    }


def _group(group: GroupRecord) -> dict[str, Any]:
    return {
        "model": group.model,
        "group": group.group,
        "ranks": list(group.ranks),
        "parallel": f"{group.tensor_parallel}×{group.pipeline_parallel}",
        "state": group.residency or group.state,
        "reason": group.reason,
        "progress": group.progress,
        "running": group.running,
        "waiting": group.waiting,
        "standby_bytes": group.standby_bytes,
        "kv_bytes": group.kv_bytes,
        "kv_used_bytes": group.kv_used_bytes,
    }
