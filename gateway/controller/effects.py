"""What the controller does to the world, and nothing else of it (rule 2). Slow calls are awaited off the loop's back."""

from __future__ import annotations

from typing import Protocol

from gateway.api.config import PoolSpec
from gateway.api.records import ControllerRecord, FootprintRecord, NodeRecord
from gateway.controller.situation import AppSight
from placement.types import PlacedGroup


class StaleFence(Exception):
    """A driver has seen a newer fencing token: another controller acts."""


class Unreachable(Exception):
    """A driver, Serve or Redis did not do what it was asked to; the next pass tries again."""


class Effects(Protocol):
    async def placement(self) -> tuple[PlacedGroup, ...] | None:
        """The stored placement; None when there is none."""
        ...

    async def save_placement(self, groups: tuple[PlacedGroup, ...]) -> bool:
        """False: the lease is lost, and nothing was written."""
        ...

    async def footprints(self) -> tuple[FootprintRecord, ...]:
        """What earlier loads took, as stored."""
        ...

    async def save_footprints(self, footprints: tuple[FootprintRecord, ...]) -> bool:
        """False: the lease is lost, and nothing was written."""
        ...

    async def report(self, record: ControllerRecord) -> None: ...

    async def event(self, kind: str, subject: str, message: str) -> None: ...

    async def apps(self) -> tuple[dict[str, AppSight], frozenset[str]]:
        """Pool applications by pool name, and the pools that hold devices (a placement group). Ages are left at 0."""
        ...

    async def nodes(self) -> tuple[NodeRecord, ...]:
        """The living nodes of Ray."""
        ...

    async def deploy_pool(self, pool: str, spec: PoolSpec) -> None:
        """Starts the pool's application, or starts it anew. Returns when Serve has taken it over, not when it runs."""
        ...

    async def delete_pool(self, pool: str) -> None:
        """Ends the pool's application and then gives its devices back."""
        ...

    async def release_devices(self, pool: str) -> None: ...

    async def assign(self, endpoint: str, fence: int, revision: int, assignments: tuple[bytes, ...]) -> None:
        """Raises StaleFence or Unreachable."""
        ...
