"""Groups that take turns: a pool may own more model bytes than its devices have memory, as long as host memory has the rest.

A group that fits nowhere beside the others is placed where it fits alone (beside what never parks). Its driver wakes it when it
is asked for, and parks others for it. What that takes of host memory: every such group's bytes, and on each device the largest
of the other groups, which may have to leave for one of them. Host memory is counted by node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from placement.free_memory import Domain
from placement.types import Device, PlacedGroup

Place = tuple[str, int]


class StandbyMemory:
    def __init__(self, devices: Iterable[Device]) -> None:
        self._node: dict[Place, str] = {}
        self._alone: dict[Place, int] = {}  # bytes beside what never parks
        self._host: dict[str, int] = defaultdict(int)
        for device in devices:
            place = (device.pool, device.rank)
            self._node[place] = device.node
            if device.healthy and not device.cordoned:
                self._alone[place] = device.capacity_bytes - device.foreign_bytes
            self._host[device.node] += device.standby_bytes
        self._waiting: dict[Place, list[int]] = defaultdict(list)  # bytes of each group that takes turns
        self._largest: dict[Place, int] = defaultdict(int)  # of the others

    @property
    def exists(self) -> bool:
        return any(self._host.values())

    def add_resident(self, group: PlacedGroup, *, pinned: bool) -> None:
        """A group that has memory of its own."""
        for place, size in _places(group):
            if pinned:
                self._alone[place] = self._alone.get(place, 0) - size
            else:
                self._largest[place] = max(self._largest[place], size)

    def harmed(self, group: PlacedGroup, *, pinned: bool) -> list[int]:
        """Ranks where a group with memory of its own would bar one that takes turns there: by staying where that needs the
        device alone, or by needing the host memory in which it stands by."""
        found = []
        for place, size in _places(group):
            if not self._waiting[place]:
                continue
            if pinned:
                harms = self._alone.get(place, 0) - size < max(self._waiting[place])
            else:
                before = self._largest[place]
                self._largest[place] = max(before, size)
                harms = not self._fits(self._node[place])
                self._largest[place] = before
            if harms:
                found.append(place[1])
        return found

    def would_fit(self, group: PlacedGroup) -> bool:
        """Whether `reserve` would take it."""
        if not self.reserve(group):
            return False
        for place, size in _places(group):
            self._waiting[place].remove(size)
        return True

    def reserve(self, group: PlacedGroup) -> bool:
        """A group that takes turns: all of its ranks or none."""
        if any(self._alone.get(place, -1) < size for place, size in _places(group)):
            return False
        for place, size in _places(group):
            self._waiting[place].append(size)
        if all(self._fits(self._node[place]) for place, _ in _places(group)):
            return True
        for place, size in _places(group):
            self._waiting[place].remove(size)
        return False

    def find(
        self, domains: Iterable[Domain], tensor: int, sizes: Sequence[int], barred: Collection[int]
    ) -> tuple[tuple[int, ...], int] | None:
        """(ranks stage-major, score) in domains of one pool: each stage in one domain, where the fewest bytes take turns.
        `barred`: ranks that may not be chosen. Nothing is reserved.
        """
        ranks: list[int] = []
        score = 0
        taken = set(barred)
        for size in sizes:
            best: tuple[tuple[int, int], list[int]] | None = None
            for domain in domains:
                pool = domain.key[0]
                able = [-rank for _, rank in domain.free if -rank not in taken and self._alone.get((pool, -rank), -1) >= size]
                able.sort(key=lambda rank: (sum(self._waiting[pool, rank]), rank))
                if len(able) >= tensor:
                    order = (sum(self._waiting[pool, able[tensor - 1]]), domain.index)
                    if best is None or order < best[0]:
                        best = (order, able[:tensor])
            if best is None:
                return None
            ranks += sorted(best[1])
            taken.update(best[1])
            score = max(score, best[0][0])
        return tuple(ranks), score

    def _fits(self, node: str) -> bool:
        used = sum(
            sum(sizes) + self._largest[place] for place, sizes in self._waiting.items() if sizes and self._node[place] == node
        )
        return used <= self._host[node]


def _places(group: PlacedGroup) -> list[tuple[Place, int]]:
    return [((group.pool, rank), size) for rank, size in zip(group.ranks, group.bytes_per_rank, strict=True)]
