"""Filling given devices with given groups: wide groups by backtracking, then each device as full as can be.

    1. Wide groups one after the other, most bytes first, on devices of one domain: all ways to do it are tried, the tightest
       ones first (`_layouts`).
    2. For each of these the devices one after the other, those with the least room first: of the groups of one rank that are
       left the set that leaves the least empty there (`_fullest`), the largest that fits always among them.
    3. Given up as soon as more is left empty than all bytes together allow.

Two groups of one model never share a device. What it may cost is bounded by steps, not by a clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from placement.types import Device, ModelRequest, PlacedGroup

_CHOICES = 12  # sets of devices tried for one wide group in one domain
_SET_STEPS = 1500  # sets looked at to fill one device


@dataclass
class Steps:
    """What is left of the effort that a search may take."""

    left: int

    def take(self, count: int = 1) -> bool:
        self.left -= count
        return self.left > 0


@dataclass(eq=False)
class _Site:
    """The devices, and what is free of each while a filling is in the making."""

    devices: Sequence[Device]
    free: list[int]
    domains: list[list[int]]
    holds: list[set[str]]  # models by device
    placed: list[tuple[PlacedGroup, tuple[int, ...]]] = field(default_factory=list)

    def put(self, group: PlacedGroup, at: tuple[int, ...]) -> None:
        for index in at:
            self.free[index] -= group.bytes_per_rank[0]
            self.holds[index].add(group.model)
        self.placed.append((group, at))

    def take_back(self, count: int) -> None:
        """The last groups that were put, down to `count` of them."""
        while len(self.placed) > count:
            group, at = self.placed.pop()
            for index in at:
                self.free[index] += group.bytes_per_rank[0]
                self.holds[index].discard(group.model)

    def groups(self) -> tuple[PlacedGroup, ...]:
        return tuple(
            replace(group, pool=self.devices[at[0]].pool, ranks=tuple(sorted(self.devices[index].rank for index in at)))
            for group, at in self.placed
        )


def fill(
    devices: Sequence[Device],
    models: Mapping[str, ModelRequest],
    kinds: Mapping[str, str],
    groups: Sequence[PlacedGroup],
    steps: Steps,
) -> tuple[PlacedGroup, ...] | None:
    """All groups (of one stage each) on the devices; None when no way is found within `steps`. `kinds`: the kind of device
    that each model's groups are for.
    """
    by_domain: dict[tuple[str, str, str], list[int]] = {}
    for index, device in enumerate(devices):
        by_domain.setdefault((device.pool, device.node, device.nvlink_domain), []).append(index)
    free = [device.capacity_bytes - device.foreign_bytes for device in devices]
    site = _Site(devices, free, list(by_domain.values()), [set() for _ in devices])
    may = {
        name: frozenset(
            index
            for index, device in enumerate(devices)
            if device.kind == kind and (not models[name].pools or device.pool in models[name].pools)
        )
        for name, kind in kinds.items()
    }
    spare = sum(free) - sum(sum(group.bytes_per_rank) for group in groups)
    if spare < 0:
        return None
    wide = [group for group in groups if group.tensor_parallel > 1]
    narrow = [group for group in groups if group.tensor_parallel == 1]
    wide.sort(key=lambda group: (-sum(group.bytes_per_rank), group.model, group.ranks))
    narrow.sort(key=lambda group: (-group.bytes_per_rank[0], group.model, group.ranks))
    for _ in _layouts(site, wide, may, steps):
        for widest_room_first in (False, True):
            mark = len(site.placed)
            if _fill_each(site, narrow, may, spare, steps, -1 if widest_room_first else 1):
                return site.groups()
            site.take_back(mark)
        if steps.left <= 0:
            return None
    return None


def _layouts(
    site: _Site, wide: Sequence[PlacedGroup], may: Mapping[str, frozenset[int]], steps: Steps, at: int = 0
) -> Iterator[None]:
    """Each way to place the wide groups, on the site while it is looked at."""
    if at == len(wide):
        yield
        return
    if not steps.take():
        return
    group = wide[at]
    for spot in _spots(site, group, may[group.model]):
        mark = len(site.placed)
        site.put(group, spot)
        yield from _layouts(site, wide, may, steps, at + 1)
        site.take_back(mark)
        if steps.left <= 0:
            return


def _spots(site: _Site, group: PlacedGroup, may: frozenset[int]) -> list[tuple[int, ...]]:
    """Sets of devices of one domain, those with the least left over first; of sets that are alike one."""
    need, degree = group.bytes_per_rank[0], group.tensor_parallel
    found: dict[tuple, tuple[int, tuple[int, ...]]] = {}
    for members in site.domains:
        fitting = [
            index for index in members if index in may and site.free[index] >= need and group.model not in site.holds[index]
        ]
        fitting.sort(key=lambda index: (site.free[index], index))
        for count, spot in enumerate(combinations(fitting, degree)):
            if count == _CHOICES:
                break
            alike = (len(members), *((site.free[index], frozenset(site.holds[index])) for index in spot))
            found.setdefault(alike, (sum(site.free[index] for index in spot), spot))
    return [spot for _, spot in sorted(found.values())]


def _fill_each(
    site: _Site,
    narrow: Sequence[PlacedGroup],
    may: Mapping[str, frozenset[int]],
    spare: int,
    steps: Steps,
    direction: int,
) -> bool:
    left = list(narrow)
    for index in sorted(range(len(site.devices)), key=lambda index: (direction * site.free[index], index)):
        fitting: list[PlacedGroup] = []
        for group in left:
            known = fitting and fitting[-1].model == group.model
            if index in may[group.model] and group.model not in site.holds[index] and not known:
                fitting.append(group)
        for group in _fullest(fitting, site.free[index], steps):
            site.put(group, (index,))
            left.remove(group)
        spare -= site.free[index]
        if spare < 0 or steps.left <= 0:
            return False
    return not left


def _fullest(groups: Sequence[PlacedGroup], room: int, steps: Steps) -> list[PlacedGroup]:
    """The groups, descending by bytes, that fill `room` best: the largest that fits, and what goes best with it."""
    sizes = [group.bytes_per_rank[0] for group in groups]
    rest = [0] * (len(sizes) + 1)  # bytes of all from here on
    for index in range(len(sizes) - 1, -1, -1):
        rest[index] = rest[index + 1] + sizes[index]
    best: tuple[int, tuple[int, ...]] = (room, ())
    count = _SET_STEPS

    def search(first: int, room: int, chosen: tuple[int, ...]) -> None:
        nonlocal best, count
        if room < best[0]:
            best = (room, chosen)
        for index in range(first, len(sizes)):
            if count <= 0 or best[0] == 0 or room - rest[index] >= best[0]:
                return
            if sizes[index] > room or (index > first and sizes[index] == sizes[index - 1]):
                continue
            count -= 1
            search(index + 1, room - sizes[index], (*chosen, index))
            if not chosen:
                return  # the largest that fits stays

    search(0, room, ())
    steps.take(_SET_STEPS - count + 1)
    return [groups[index] for index in best[1]]
