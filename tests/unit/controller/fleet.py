"""A small fleet for the tests of the controller: models with a known footprint, pools, and a world that its effects change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from gateway.api.config import ModelSpec, PoolSpec
from gateway.api.proto.pool_pb2 import Assignment
from gateway.api.records import ControllerRecord, DesiredObject, FootprintRecord, GroupRecord, NodeRecord, PoolRecord, RankRecord
from gateway.controller.effects import StaleFence, Unreachable
from gateway.controller.model_requests import AskedModel
from gateway.controller.pool_digest import deployment_name
from gateway.controller.situation import AppSight
from gateway.state.snapshot import ObjectKey, Observed, Snapshot
from gateway.state.view import ModelEntry, SiteView
from placement.types import ModelRequest, ModelShape, PlacedGroup

GIB = 2**30
SHAPE = ModelShape(
    family="llama",
    layers=4,
    hidden=256,
    heads=4,
    kv_heads=4,
    head_dim=64,
    intermediate=512,
    vocabulary=1000,
    max_context=256,
    tied_embeddings=True,
    layer_bytes=(GIB // 4,) * 4,
    embedding_bytes=2**20,
    head_bytes=0,
)
"""A model of a little more than 1 GiB."""


def model_spec(**spec: object) -> ModelSpec:
    values = {"source": "file:/m", "tensor_parallel": 1, "pipeline_parallel": 1, "limits": {"concurrency": 1}, **spec}
    return ModelSpec.model_validate(values)


def pool_spec(devices: int = 1, memory: str = "2GiB") -> PoolSpec:
    return PoolSpec.model_validate({"device": "cpu", "devices": devices, "memory": memory})


def asked(name: str, spec: ModelSpec, generation: int = 1) -> AskedModel:
    request = ModelRequest(
        name,
        SHAPE,
        replicas=spec.replicas,
        tensor_parallel=None if spec.tensor_parallel == "auto" else spec.tensor_parallel,
        pipeline_parallel=None if spec.pipeline_parallel == "auto" else spec.pipeline_parallel,
        context=256,
        concurrency=spec.limits.concurrency,
        pools=spec.pools,
        priority=spec.priority,
        precision="fp32",
    )
    return AskedModel(spec, generation, request)


class KnownCheckpoints:
    """All checkpoints are SHAPE, except those in `unreadable` (by model)."""

    def __init__(self) -> None:
        self.unreadable: set[str] = set()

    def asked(self, models: Mapping[str, ModelEntry]) -> dict[str, AskedModel]:
        return {
            name: AskedModel(entry.spec, entry.generation, None, "cannot be read")
            if name in self.unreadable
            else asked(name, entry.spec, entry.generation)
            for name, entry in models.items()
        }


class Crash(Exception):
    """The controller's process ends right after an effect."""


@dataclass
class World:
    """Serve, the pool drivers and the store, with the controller's effects on them. Time passes when a test says so."""

    view: SiteView = field(default_factory=SiteView)
    now: float = 1000.0
    running: dict[str, tuple[PoolSpec, PoolRecord]] = field(default_factory=dict)  # pools whose driver is up
    sightings: dict[str, AppSight] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    stored: tuple[PlacedGroup, ...] | None = None
    learned: tuple[FootprintRecord, ...] = ()
    record: ControllerRecord | None = None
    events: list[tuple[str, str, str]] = field(default_factory=list)
    loads: list[tuple[str, str]] = field(default_factory=list)  # (pool, model) of every load that began
    effects: list[str] = field(default_factory=list)
    fence: int = 0
    crash_after: int = 0  # the number of the effect after which the process ends; 0: never
    lease_lost: bool = False
    unreachable: set[str] = field(default_factory=set)
    stuck: set[str] = field(default_factory=set)  # pools that Serve cannot start
    _desired: dict[ObjectKey, DesiredObject] = field(default_factory=dict)
    _revision: int = 0

    # What ops and fate do.

    def want(self, kind: str, name: str, spec: ModelSpec | PoolSpec | None) -> None:
        """A desired object, changed or (None) deleted."""
        self._revision += 1
        key = ObjectKey(kind, name)
        if spec is None:
            del self._desired[key]
        else:
            known = self._desired.get(key)
            document = {
                "apiVersion": "modelyard/v1",
                "kind": kind,
                "metadata": {"name": name},
                "spec": spec.model_dump(mode="json"),
            }
            generation = known.generation + 1 if known else 1
            self._desired[key] = DesiredObject(kind, name, generation, self._revision, document, 0.0)
        self.view.apply_desired(Snapshot(self._revision, dict(self._desired)))
        self.show()

    def finish_loads(self) -> None:
        """Every group that loads becomes ready; one that drains is gone."""
        for name, (spec, record) in self.running.items():
            groups = tuple(msgspec.structs.replace(group, state="ready") for group in record.groups if group.state != "draining")
            self.running[name] = (spec, msgspec.structs.replace(record, groups=groups))
        self.show()

    def lose_node(self, pool: str) -> None:
        """The driver and its ranks are gone; Serve still has the application and cannot run it."""
        del self.running[pool]
        self.sightings[pool] = replace(self.sightings[pool], status="DEPLOYING")
        self.show()

    def show(self) -> None:
        self.view.apply_observed(Observed({name: record for name, (_, record) in self.running.items()}))
        self.view.set_degraded(None)

    def groups(self, pool: str) -> dict[str, str]:
        """Model -> state."""
        return {group.model: group.state for group in self.running[pool][1].groups}

    # The controller's effects.

    def _done(self, effect: str) -> None:
        self.effects.append(effect)
        self.show()
        if len(self.effects) == self.crash_after:
            raise Crash(effect)

    async def placement(self) -> tuple[PlacedGroup, ...] | None:
        return self.stored

    async def save_placement(self, groups: tuple[PlacedGroup, ...]) -> bool:
        if self.lease_lost:
            return False
        self.stored = groups
        self._done("save")
        return True

    async def footprints(self) -> tuple[FootprintRecord, ...]:
        return self.learned

    async def save_footprints(self, footprints: tuple[FootprintRecord, ...]) -> bool:
        if self.lease_lost:
            return False
        self.learned = footprints
        self._done("learn")
        return True

    async def report(self, record: ControllerRecord) -> None:
        self.record = record
        self._done("report")

    async def event(self, kind: str, subject: str, message: str) -> None:
        self.events.append((kind, subject, message))
        self._done(f"event {kind}")

    async def nodes(self) -> tuple[NodeRecord, ...]:
        return (NodeRecord("node-1", 1 << 20, 0),)

    async def apps(self) -> tuple[dict[str, AppSight], frozenset[str]]:
        return dict(self.sightings), frozenset(self.held)

    async def deploy_pool(self, pool: str, spec: PoolSpec) -> None:
        self.sightings[pool] = AppSight("DEPLOYING" if pool in self.stuck else "RUNNING", deployment_name(spec))
        if pool not in self.stuck:
            ranks = tuple(RankRecord(index, f"node-{pool}", 1, "cpu", spec.memory or 0) for index in range(spec.devices))
            incarnation = f"{pool}-{len(self.effects)}"
            self.running[pool] = (spec, PoolRecord(pool, pool, incarnation, f"node-{pool}", 1, "cpu", 0, 0, 0.0, ranks=ranks))
            self.held.add(pool)
        self._done(f"deploy {pool}")

    async def delete_pool(self, pool: str) -> None:
        del self.sightings[pool]
        self.running.pop(pool, None)
        self.held.discard(pool)
        self._done(f"delete {pool}")

    async def release_devices(self, pool: str) -> None:
        self.held.discard(pool)
        self._done(f"release {pool}")

    async def assign(self, endpoint: str, fence: int, revision: int, assignments: tuple[bytes, ...]) -> None:
        """The endpoint of a pool is its name."""
        if endpoint in self.unreachable or endpoint not in self.running:
            raise Unreachable(f"{endpoint} does not answer")
        if fence < self.fence:
            raise StaleFence(f"{endpoint} has seen {self.fence}")
        self.fence = fence
        spec, record = self.running[endpoint]
        wanted = [Assignment.FromString(item) for item in assignments]
        places = {(item.model, item.generation, tuple(group.ranks)): group for item in wanted for group in item.groups}
        groups = []
        for group in record.groups:
            key = (group.model, group.generation, group.ranks)
            if places.pop(key, None) is not None:
                groups.append(group)
            else:
                groups.append(msgspec.structs.replace(group, state="draining"))
        for (name, generation, ranks), group in places.items():
            self.loads.append((endpoint, name))
            number = len(self.loads)
            groups.append(GroupRecord(name, generation, number, ranks, group.tensor_parallel, group.pipeline_parallel, "loading"))
        self.running[endpoint] = (spec, msgspec.structs.replace(record, groups=tuple(groups), fence=fence))
        self._done(f"assign {endpoint}")
