"""What is stored of a site's desired state, as one value read at one revision, and how two such values are reconciled."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple

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
    generation never comes back with other content. `identity` says which store it was read from: the id that a store gets with
    its first write, and the ids of those that were restored into it (`-id`: of those that were given up for it).
    """

    revision: int = 0
    objects: dict[ObjectKey, DesiredObject] = {}
    tombstones: dict[ObjectKey, int] = {}
    identity: str = ""

    def generation(self, key: ObjectKey) -> int:
        """Newest generation known of a name, also of a deleted one; 0 if it never existed."""
        stored = self.objects.get(key)
        return stored.generation if stored else self.tombstones.get(key, 0)

    def names(self) -> AbstractSet[ObjectKey]:
        """Every name that exists or existed."""
        return self.objects.keys() | self.tombstones.keys()


class Backup(msgspec.Struct, frozen=True):
    """A snapshot as it is kept in a file."""

    revision: int
    identity: str
    objects: list[DesiredObject]
    tombstones: dict[str, int] = {}

    @staticmethod
    def of(snapshot: Snapshot) -> Backup:
        objects = [stored for _, stored in sorted(snapshot.objects.items())]
        dead = {str(key): generation for key, generation in sorted(snapshot.tombstones.items())}
        return Backup(snapshot.revision, snapshot.identity, objects, dead)

    def snapshot(self) -> Snapshot:
        objects = {ObjectKey(stored.kind, stored.name): stored for stored in self.objects}
        dead = {ObjectKey.parse(name): generation for name, generation in self.tombstones.items()}
        return Snapshot(self.revision, objects, dead, self.identity)


class Observed(msgspec.Struct, frozen=True):
    """The heartbeat records that had not expired when they were read."""

    pools: dict[str, PoolRecord] = {}
    gateways: dict[str, GatewayRecord] = {}
    controller: ControllerRecord | None = None


Relation = Literal["same", "replaced", "given_up"]


def relation(held: Snapshot, stored: Snapshot) -> Relation:
    """Whether a store is the one that a process has read before. A store that was emptied lost its identity too; a replica
    that lagged, or an old copy, has kept it.

    replaced: another one, to which nothing is given back unless somebody says so (`yard restore`).
    given_up: another one, for which somebody gave up what is held.
    """
    if not held.revision:
        return "same"
    if not held.identity:
        return "same" if stored.revision else "replaced"
    mine, theirs = set(held.identity.split(",")), set(stored.identity.split(","))
    if mine & theirs:
        return "same"
    return "given_up" if any(f"-{identity}" in theirs for identity in mine) else "replaced"


def lost_names(held: Snapshot, stored: Snapshot) -> frozenset[ObjectKey]:
    """The names of which the store has forgotten something that this process has seen: it was restored from an old copy, or
    failed over to a replica that lagged. Generations only grow, so a lower one says it."""
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
    return Snapshot(max(held.revision, stored.revision), objects, tombstones, stored.identity)
