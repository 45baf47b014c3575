"""The values that the controller's decision is made of: what is desired, observed and placed, and what is to be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.api.records import PoolRecord
from gateway.controller.model_requests import AskedModel
from gateway.state.view import PoolEntry
from placement.types import PlacedGroup, Plan, Snapshot

LOST_S = 30.0
"""A pool or a rank gone for less is expected back: a restarted driver adopts its ranks, a group restarts as one."""
DRAIN_S = 60.0
START_DEADLINE_S = 90.0
REASSERT_S = 15.0
REDEPLOY_S = 30.0


@dataclass(frozen=True)
class Desired:
    models: Mapping[str, AskedModel] = field(default_factory=dict)
    pools: Mapping[str, PoolEntry] = field(default_factory=dict)


@dataclass(frozen=True)
class PoolSight:
    """A pool's last record; `missing_s` since its heartbeat expired (0: it is there); `dead_s` by rank since it died."""

    record: PoolRecord
    missing_s: float = 0.0
    dead_s: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AppSight:
    """A pool's Serve application. `closing_s`: for how long it has been one that should go."""

    status: str  # Serve's: DEPLOYING, RUNNING, DEPLOY_FAILED, DELETING, UNHEALTHY
    deployment: str  # name of the driver's deployment, which tells its specification
    message: str = ""
    age_s: float = 0.0
    closing_s: float = 0.0


@dataclass(frozen=True)
class Observed:
    pools: Mapping[str, PoolSight] = field(default_factory=dict)
    apps: Mapping[str, AppSight] = field(default_factory=dict)
    devices_held: frozenset[str] = frozenset()  # pools whose placement group exists
    watching_s: float = 0.0  # how long this controller has been looking; it cannot know of earlier sights


@dataclass(frozen=True)
class Ack:
    """An assignment that a driver has taken."""

    incarnation: str
    fence: int
    assignments: tuple[bytes, ...]
    age_s: float = 0.0


@dataclass(frozen=True)
class Placed:
    """What was decided before. `groups` is None when no placement is stored (a new site, or a store that was flushed)."""

    groups: tuple[PlacedGroup, ...] | None = None
    refused: frozenset[str] = frozenset()  # the models of which it was said that they are nowhere
    acks: Mapping[str, Ack] = field(default_factory=dict)
    fence: int = 0


@dataclass(frozen=True)
class DeployPool:
    pool: str


@dataclass(frozen=True)
class DeletePool:
    pool: str


@dataclass(frozen=True)
class ReleaseDevices:
    """Gives back what the ranks of a pool without application still hold."""

    pool: str


@dataclass(frozen=True)
class Assign:
    pool: str
    endpoint: str
    incarnation: str
    assignments: tuple[bytes, ...]  # serialised, so that they compare


@dataclass(frozen=True)
class Emit:
    kind: str
    subject: str
    message: str


Action = DeployPool | DeletePool | ReleaseDevices | Assign


@dataclass(frozen=True)
class Decision:
    """`groups` are to be stored before any action is done, so that a crash cannot forget where a model was put."""

    groups: tuple[PlacedGroup, ...]
    unplaced: dict[str, tuple[str, ...]]
    refused: frozenset[str]
    actions: tuple[Action, ...]
    events: tuple[Emit, ...]
    message: str
    plan: Plan
    snapshot: Snapshot  # what the plan was made of
