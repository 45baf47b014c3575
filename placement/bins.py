"""Moving placed groups between devices: to close some of them, or to admit groups that fit nowhere as things are."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from placement.types import Device, ModelRequest, PlacedGroup

_MAX_DEPTH = 4
_EXCHANGES = 8  # empty devices tried against two in use


@dataclass(eq=False)
class _Item:
    """One worker group. Only tensor-parallel groups of one stage move; pipelines stay."""

    group: PlacedGroup
    movable: bool
    domains: list[list[int]]  # devices of each domain it may live in
    bins: tuple[int, ...]
    replicas: list[_Item]  # all groups of the model, this one too: no two of them share a device

    @property
    def need(self) -> int:
        return self.group.bytes_per_rank[0]

    def barred(self) -> set[int]:
        """Devices of the model's other groups."""
        return {at for other in self.replicas if other is not self for at in other.bins}


class _Log(list[tuple[_Item, tuple[int, ...]]]):
    """Each item that was moved, with the devices it was on before (none: it was nowhere)."""


class Bins:
    """`fixed` names models whose groups stay where they are."""

    def __init__(
        self,
        devices: Iterable[Device],
        models: Iterable[ModelRequest],
        groups: Iterable[PlacedGroup],
        fixed: Collection[str] = (),
    ) -> None:
        usable = [device for device in devices if device.healthy and not device.cordoned]
        self._devices = sorted(usable, key=lambda device: (device.pool, device.rank))
        self._index = {(device.pool, device.rank): at for at, device in enumerate(self._devices)}
        self._capacity = [device.capacity_bytes - device.foreign_bytes for device in self._devices]
        self._free = list(self._capacity)
        self._on: list[set[_Item]] = [set() for _ in self._devices]
        self._requests = {request.name: request for request in models}
        self._fixed = frozenset(fixed)
        self._members: dict[tuple[str, str, str], list[int]] = {}
        for at in range(len(self._devices)):
            self._members.setdefault(self._domain_key(at), []).append(at)
        self._allowed: dict[tuple, list[list[int]]] = {}
        self._items: list[_Item] = []
        self._replicas: dict[str, list[_Item]] = {}
        for group in sorted(groups, key=lambda group: (group.model, group.pool, group.ranks)):
            item = self._item(group)
            self._put(item, tuple(self._index[group.pool, rank] for rank in group.ranks))
        self._open = {at for at, items in enumerate(self._on) if items}
        self._steps = 0
        self.effort = 0  # devices and groups looked at so far: what the searches cost, each about 0.2 µs

    def _item(self, group: PlacedGroup) -> _Item:
        request = self._requests[group.model]
        kind = self._devices[self._index[group.pool, group.ranks[0]]].kind
        key = (request.pools, kind, group.tensor_parallel)
        if key not in self._allowed:
            self._allowed[key] = [
                members
                for (pool, _, _), members in self._members.items()
                if (not request.pools or pool in request.pools)
                and self._devices[members[0]].kind == kind
                and len(members) >= group.tensor_parallel
            ]
        movable = group.pipeline_parallel == 1 and group.model not in self._fixed
        replicas = self._replicas.setdefault(group.model, [])
        item = _Item(group, movable, self._allowed[key], (), replicas)
        replicas.append(item)
        self._items.append(item)
        return item

    def groups(self) -> Iterable[PlacedGroup]:
        for item in self._items:
            ranks = tuple(self._devices[at].rank for at in item.bins)
            if item.movable:
                ranks = tuple(sorted(ranks))
            yield replace(item.group, pool=self._devices[item.bins[0]].pool, ranks=ranks)

    def close_one(self, steps: int) -> bool:
        """Empty one device for good, or two against one larger that was empty; False, and nothing changed, when it is not
        found within `steps` moves each.
        """
        return self._close(steps, _Log()) is not None or self._exchange(steps)

    def _exchange(self, steps: int) -> bool:
        closed = [at for at in range(len(self._devices)) if at not in self._open]
        smallest = min((self._capacity[at] for at in self._open), default=0)
        tried: set[tuple[int, tuple[str, str, str]]] = set()
        for at in sorted(closed, key=lambda at: (-self._capacity[at], at)):
            sort = (self._capacity[at], self._domain_key(at))
            if self._capacity[at] <= smallest or sort in tried or len(tried) == _EXCHANGES:
                continue
            tried.add(sort)
            self._open.add(at)
            log = _Log()
            first = self._close(steps, log, keep=at)
            if first is not None:
                if self._close(steps, log, keep=at) is not None:
                    return True
                self._undo(log, 0)
                self._open.add(first)
            self._open.remove(at)
        return False

    def _close(self, steps: int, log: _Log, keep: int = -1) -> int | None:
        """The device that was emptied, its moves in `log`; None, and nothing changed."""
        mark = len(log)
        for at in sorted(self._open - {keep}, key=lambda at: (self._load(at), at)):
            items = sorted(self._on[at], key=lambda item: (-item.need, item.group.model, item.bins))
            if not all(item.movable for item in items):
                continue
            if sum(self._free[other] for other in self._open if other != at) < self._load(at):
                break  # the others are heavier still
            self._steps = steps
            self._open.remove(at)
            for item in items:
                log.append((item, item.bins))
                self._take(item)
            if self._place_all(items, _MAX_DEPTH, log):
                return at
            self._undo(log, mark)
            self._open.add(at)
        return None

    def _domain_key(self, at: int) -> tuple[str, str, str]:
        device = self._devices[at]
        return device.pool, device.node, device.nvlink_domain

    def admit(self, groups: Iterable[PlacedGroup], steps: int) -> bool:
        """Place groups anew (where they were does not matter), on any device; False, nothing changed, when none is found."""
        self._open = set(range(len(self._devices)))
        self._steps = steps
        items = [self._item(group) for group in groups]
        items.sort(key=lambda item: (-item.need * item.group.tensor_parallel, item.group.model))
        if self._place_all(items, _MAX_DEPTH, _Log()):
            return True
        for item in items:
            item.replicas.remove(item)
        del self._items[len(self._items) - len(items) :]
        return False

    def _load(self, at: int) -> int:
        return sum(item.need if item.movable else max(item.group.bytes_per_rank) for item in self._on[at])

    def _place_all(self, items: list[_Item], depth: int, log: _Log) -> bool:
        """All of them, or as before."""
        mark = len(log)
        for item in items:
            if not self._place(item, depth, log):
                self._undo(log, mark)
                return False
        return True

    def _place(self, item: _Item, depth: int, log: _Log) -> bool:
        self._steps -= 1
        spot = self._tightest(item)
        if spot is not None:
            log.append((item, ()))
            self._put(item, spot)
            return True
        if depth == 0 or self._steps <= 0:
            return False
        for spot, ejected in self._with_ejections(item):
            mark = len(log)
            for other in ejected:
                log.append((other, other.bins))
                self._take(other)
            log.append((item, ()))
            self._put(item, spot)
            if self._place_all(ejected, depth - 1, log):
                return True
            self._undo(log, mark)
            if self._steps <= 0:
                return False
        return len(item.replicas) > 1 and self._place_for_larger(item, log)

    def _place_for_larger(self, item: _Item, log: _Log) -> bool:
        """A replica on the device of a larger group that has room elsewhere, where the model's other replicas may be."""
        if item.group.tensor_parallel > 1:
            return False
        mark = len(log)
        barred = item.barred()
        for at in (at for members in item.domains for at in members if at in self._open and at not in barred):
            larger = (other for other in self._on[at] if other.movable and other.need >= item.need)
            for other in sorted(larger, key=lambda other: (other.need, other.group.model, other.bins)):
                self._steps -= 1
                if self._steps <= 0:
                    return False
                log.append((other, other.bins))
                self._take(other)
                log.append((item, ()))
                self._put(item, (at,))
                spot = self._tightest(other)
                if spot is not None:
                    log.append((other, ()))
                    self._put(other, spot)
                    return True
                self._undo(log, mark)
        return False

    def _tightest(self, item: _Item) -> tuple[int, ...] | None:
        """The open devices of one domain that it fits into with the least left over."""
        best: tuple[int, tuple[int, ...]] | None = None
        degree, need = item.group.tensor_parallel, item.need
        open_ = self._open - item.barred() if len(item.replicas) > 1 else self._open
        self.effort += len(self._devices) + 8
        for members in item.domains:
            fitting = sorted((self._free[at], at) for at in members if at in open_ and self._free[at] >= need)
            if len(fitting) < degree:
                continue
            left = sum(free for free, _ in fitting[:degree])
            if best is None or left < best[0]:
                best = (left, tuple(at for _, at in fitting[:degree]))
        return None if best is None else best[1]

    def _with_ejections(self, item: _Item) -> Iterable[tuple[tuple[int, ...], list[_Item]]]:
        """(devices, items to take off them) where the item then fits: first where the least is ejected."""
        degree, need = item.group.tensor_parallel, item.need
        choices = []
        open_ = self._open - item.barred() if len(item.replicas) > 1 else self._open
        for members in item.domains:
            costs = []
            for at in members:
                if at not in open_:
                    continue
                for ejected in self._ejections(at, need):
                    costs.append((sum(other.need * len(other.bins) for other in ejected), at, ejected))
            costs.sort(key=lambda cost: cost[:2])
            if degree == 1:
                choices += [(cost, (at,), ejected) for cost, at, ejected in costs]
                continue
            cheapest: dict[int, tuple[int, list[_Item]]] = {}
            for cost, at, ejected in costs:
                cheapest.setdefault(at, (cost, ejected))
            if len(cheapest) >= degree:
                chosen = sorted(cheapest, key=lambda at: (cheapest[at][0], at))[:degree]
                ejected = list(dict.fromkeys(other for at in chosen for other in cheapest[at][1]))
                choices.append((sum(cheapest[at][0] for at in chosen), tuple(chosen), ejected))
        choices.sort(key=lambda choice: choice[:2])
        self._steps -= len(choices) // 16  # listing them is work too
        self.effort += 8 * len(choices) + len(self._devices)
        for _, spot, ejected in choices:
            yield spot, sorted(ejected, key=lambda other: (-other.need, other.group.model, other.bins))

    def _ejections(self, at: int, need: int) -> Iterable[list[_Item]]:
        """Smaller items whose leaving makes room: none, one, or two."""
        lack = need - self._free[at]
        if lack <= 0:
            yield []
            return
        smaller = sorted(
            (item for item in self._on[at] if item.movable and item.need < need),
            key=lambda item: (item.need, item.group.model, item.bins),
        )
        for item in smaller:
            if item.need >= lack:
                yield [item]
        for first, item in enumerate(smaller):
            for other in smaller[first + 1 :]:
                if item.need < lack and other.need < lack and lack <= item.need + other.need < need:
                    yield [item, other]

    def _put(self, item: _Item, spot: tuple[int, ...]) -> None:
        item.bins = spot
        for at, size in zip(spot, item.group.bytes_per_rank, strict=True):
            self._free[at] -= size
            self._on[at].add(item)

    def _take(self, item: _Item) -> None:
        for at, size in zip(item.bins, item.group.bytes_per_rank, strict=True):
            self._free[at] += size
            self._on[at].discard(item)
        item.bins = ()

    def _undo(self, log: _Log, mark: int) -> None:
        while len(log) > mark:
            item, bins = log.pop()
            if item.bins:
                self._take(item)
            if bins:
                self._put(item, bins)
