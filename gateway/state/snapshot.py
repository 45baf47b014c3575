"""What is stored of a site's desired state, as one value read at one revision, and how two such values are reconciled."""

from __future__ import annotations

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
    """Desired state at one revision. `tombstones` hold the generation that each deleted name ended with."""

    revision: int = 0
    objects: dict[ObjectKey, DesiredObject] = {}
    tombstones: dict[ObjectKey, int] = {}

    def generation(self, key: ObjectKey) -> int:
        """Newest generation known of a name, also of a deleted one; 0 if it never existed."""
        stored = self.objects.get(key)
        return stored.generation if stored else self.tombstones.get(key, 0)


class Observed(msgspec.Struct, frozen=True):
    """The heartbeat records that had not expired when they were read."""

    pools: dict[str, PoolRecord] = {}
    gateways: dict[str, GatewayRecord] = {}
    controller: ControllerRecord | None = None


def newest(held: Snapshot, stored: Snapshot) -> Snapshot:
    """What to serve from when the store may have lost writes (rule 12: the higher generation wins).

    A store at or past the held revision is the truth. One behind it went back in time (flushed, restored from an old
    copy, failed over to a replica that lagged): then, name by name, the higher generation wins, deletions included; at
    equal generations the store's object does.
    """
    if stored.revision >= held.revision:
        return stored
    objects: dict[ObjectKey, DesiredObject] = {}
    tombstones: dict[ObjectKey, int] = {}
    for key in held.objects.keys() | stored.objects.keys() | held.tombstones.keys() | stored.tombstones.keys():
        source = held if held.generation(key) > stored.generation(key) else stored
        if key in source.objects:
            objects[key] = source.objects[key]
        else:
            tombstones[key] = source.tombstones[key]
    return Snapshot(held.revision, objects, tombstones)
