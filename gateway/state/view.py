"""The state of the site as one process sees it: plain dictionaries in memory, written by its SiteFeed and by nobody else.

Reading it never waits and never calls Redis, so requests are routed from it. Without Redis it keeps the last snapshot
(rule 12).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import ValidationError

from gateway.api.config import Manifest, ModelSpec, PoolSpec, RouteSpec, TenantSpec
from gateway.api.records import ControllerRecord, DesiredObject, GatewayRecord, GroupRecord, PoolRecord
from gateway.state.key_gate import needs_key
from gateway.state.servers import ELSEWHERE, server_groups
from gateway.state.snapshot import ObjectKey, Observed, Snapshot

log = logging.getLogger(__name__)


class ModelEntry(NamedTuple):
    spec: ModelSpec
    generation: int


class PoolEntry(NamedTuple):
    spec: PoolSpec
    generation: int


@dataclass(frozen=True)
class RouteEntry:
    """A public name and the models behind it. `implicit`: not a Route object but a model asked by its own name."""

    name: str
    generation: int
    targets: tuple[tuple[str, int], ...]  # (model, weight)
    aliases: tuple[str, ...] = ()
    implicit: bool = False
    spec: RouteSpec | None = None  # None of an implicit one


class SiteView:
    """Everything a request needs to find a pool, and everything the admin service and the controller look at.

    `degraded` is true from the start until the first snapshot, and again while Redis does not answer; `degraded_reason`
    says why. All attributes belong to the event loop that runs the feed; readers must not change them.
    """

    def __init__(self) -> None:
        self.revision = 0
        self.models: dict[str, ModelEntry] = {}
        self.routes: dict[str, RouteEntry] = {}
        self.aliases: dict[str, str] = {}  # alias -> route name
        self.tenants: dict[str, TenantSpec] = {}
        self.key_owners: dict[str, str] = {}  # SHA-256 of an API key -> tenant
        self.needs_key = False  # some stored tenant has keys, readable or not
        self.desired_pools: dict[str, PoolEntry] = {}
        self.pools: dict[str, PoolRecord] = {}  # heartbeats that have not expired
        self.gateways: dict[str, GatewayRecord] = {}
        self.controller: ControllerRecord | None = None
        self.desired = Snapshot()
        self.rejected: dict[ObjectKey, str] = {}  # stored objects that this version cannot read
        self.degraded = True
        self.degraded_reason = "the first snapshot has not been read yet"
        self.replaced = False  # Redis answers, but with another store than the one that this view was read from
        self._subscribers: list[Callable[[], None]] = []
        self._synced = asyncio.Event()

    # What readers call.

    def resolve(self, name: str) -> RouteEntry | None:
        """The route that a request for `name` takes: a route's name, one of its aliases, or a model's own name."""
        route = self.routes.get(name) or self.routes.get(self.aliases.get(name, ""))
        if route is not None:
            return route
        model = self.models.get(name)
        return RouteEntry(name, model.generation, ((name, 1),), implicit=True) if model else None

    def groups(self, model: str) -> list[tuple[str, GroupRecord]]:
        """Every observed worker group of a model, as (pool, group). One whose server runs elsewhere has one, in no pool."""
        entry = self.models.get(model)
        if entry is not None and not entry.spec.is_managed:
            return [(ELSEWHERE, group) for name, group in server_groups(self.gateways.values()).items() if name == model]
        return [(pool.pool, group) for pool in self.pools.values() for group in pool.groups if group.model == model]

    def ready_groups(self, model: str) -> int:
        return sum(group.state == "ready" for _, group in self.groups(model))

    def coming_s(self, model: str) -> list[float]:
        """Until each of its groups that are on their way serves, where that is known."""
        return [group.ready_in_s for _, group in self.groups(model) if group.ready_in_s >= 0]

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls `callback` in the loop after each applied change. Returns what ends the subscription."""
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    @property
    def synced(self) -> bool:
        """Whether a first snapshot was applied: before it, nothing can be said of what there is."""
        return self._synced.is_set()

    async def wait_synced(self) -> None:
        """Returns once a first snapshot was applied."""
        await self._synced.wait()

    # What the feed calls.

    def apply_desired(self, snapshot: Snapshot) -> None:
        """Takes over a whole snapshot; objects whose generation did not change keep their parsed form."""
        old = self.desired
        if self._synced.is_set() and snapshot == old:
            return
        self.desired, self.revision = snapshot, snapshot.revision
        self.rejected = {key: text for key, text in self.rejected.items() if old.objects.get(key) == snapshot.objects.get(key)}
        models, routes, tenants, pools = self.models, self.routes, self.tenants, self.desired_pools
        self.models, self.routes, self.tenants, self.desired_pools = {}, {}, {}, {}
        for key, stored in sorted(snapshot.objects.items()):
            spec = None if old.objects.get(key) == stored else self._parse(key, stored)
            match spec:
                case ModelSpec():
                    self.models[key.name] = ModelEntry(spec, stored.generation)
                case PoolSpec():
                    self.desired_pools[key.name] = PoolEntry(spec, stored.generation)
                case RouteSpec():
                    targets = tuple((target.model, target.weight) for target in spec.targets)
                    self.routes[key.name] = RouteEntry(key.name, stored.generation, targets, spec.aliases, spec=spec)
                case TenantSpec():
                    self.tenants[key.name] = spec
                case _:
                    # Unchanged, or unreadable: what was served before stays.
                    _keep(key, (("Model", models, self.models), ("Route", routes, self.routes)))
                    _keep(key, (("Tenant", tenants, self.tenants), ("Pool", pools, self.desired_pools)))
        self.aliases = {alias: route.name for route in self.routes.values() for alias in route.aliases}
        self.key_owners = {digest: name for name, tenant in self.tenants.items() for digest in tenant.key_hashes}
        self.needs_key = needs_key(snapshot)
        self._synced.set()
        self._notify()

    def apply_observed(self, observed: Observed) -> None:
        if (observed.pools, observed.gateways, observed.controller) == (self.pools, self.gateways, self.controller):
            return
        self.pools, self.gateways, self.controller = dict(observed.pools), dict(observed.gateways), observed.controller
        self._notify()

    def set_degraded(self, reason: str | None) -> None:
        """Redis does not answer, and why; None: it does again."""
        degraded = reason is not None
        changed = degraded != self.degraded
        self.degraded, self.degraded_reason = degraded, reason or ""
        if changed:
            self._notify()

    def _parse(self, key: ObjectKey, stored: DesiredObject) -> object | None:
        try:
            return Manifest.model_validate(stored.manifest).spec
        except ValidationError as error:
            self.rejected[key] = f"{key} generation {stored.generation} cannot be read by this version: {error}"
            log.error("%s; serving what was there before", self.rejected[key])
            return None

    def _notify(self) -> None:
        for callback in tuple(self._subscribers):
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - one subscriber's bug must not stop the feed of the others
                context = {"message": "a subscriber of the site view failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)


def _keep(key: ObjectKey, tables: tuple[tuple[str, dict, dict], ...]) -> None:
    for kind, before, after in tables:
        if key.kind == kind and key.name in before:
            after[key.name] = before[key.name]
