"""What is stored of a site's desired state, as one value read at one revision, and how two such values are reconciled."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

import msgspec

from gateway.api.records import ControllerRecord, DesiredObject, GatewayRecord, PoolRecord


class ObjectKey(NamedTuple):
    """Names one desired object; prints as `Kind/name`."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"

    @staticmethod
    def parse(text: str) -> ObjectKey:
        kind, _, name = text.partition("/")
        return ObjectKey(kind, name)


class Snapshot(msgspec.Struct, frozen=True):
    """Desired state at one revision.

    `tombstones` hold the generation with which each deleted name ended. A name made again goes on from there, so a
    generation never comes back with other content.
    """

    revision: int = 0
    objects: dict[ObjectKey, DesiredObject] = {}
    tombstones: dict[ObjectKey, int] = {}

    def generation(self, key: ObjectKey) -> int:
        """Newest generation known of a name, also of a deleted one; 0 if it never existed."""
        stored = self.objects.get(key)
        return stored.generation if stored else self.tombstones.get(key, 0)

    def names(self) -> AbstractSet[ObjectKey]:
        """Every name that exists or existed."""
        return self.objects.keys() | self.tombstones.keys()


class Observed(msgspec.Struct, frozen=True):
    """The heartbeat records that had not expired when they were read."""

    pools: dict[str, PoolRecord] = {}
    gateways: dict[str, GatewayRecord] = {}
    controller: ControllerRecord | None = None


def lost_names(held: Snapshot, stored: Snapshot) -> frozenset[ObjectKey]:
    """The names of which the store has forgotten something that this process has seen: it was flushed, restored from an
    old copy, or failed over to a replica that lagged. Generations only grow, so a lower one says it."""
    return frozenset(key for key in held.names() if held.generation(key) > stored.generation(key))


def newest(held: Snapshot, stored: Snapshot) -> Snapshot:
    """What to serve from: the stored snapshot, but name by name the higher generation wins, deletions included (rule 12)."""
    lost = lost_names(held, stored)
    if not lost:
        return stored
    objects = {key: value for key, value in stored.objects.items() if key not in lost}
    tombstones = {key: value for key, value in stored.tombstones.items() if key not in lost}
    objects |= {key: held.objects[key] for key in lost if key in held.objects}
    tombstones |= {key: held.tombstones[key] for key in lost if key in held.tombstones}
    return Snapshot(max(held.revision, stored.revision), objects, tombstones)
