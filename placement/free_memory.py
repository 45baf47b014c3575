"""Free bytes of every device that may take new ranks, ordered so that the best fitting ones are found without a scan.

A domain is what a tensor-parallel stage must stay inside: one pool, one node, one NVLink domain. Devices without NVLink exchange
over PCIe and, from one NUMA node to another, over the link between sockets: a stage should stay inside one of those too.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

from placement.types import Device

DomainKey = tuple[str, str, str]  # pool, node, NVLink domain
_BELOW_ALL = -(2**62)


@dataclass(eq=False)
class Domain:
    key: DomainKey
    kind: str
    index: int = 0  # position among all domains by key: breaks ties
    # (free bytes, -rank), ascending: of equal ones the lowest rank comes last, where the most free ones are taken from.
    free: list[tuple[int, int]] = field(default_factory=list)
    used: set[int] = field(default_factory=set)  # ranks with reservations
    used_free: list[tuple[int, int]] = field(default_factory=list)  # of `free`, those in use
    sort: int = 0  # domains of one sort are alike while none of their devices is in use
    type: str = ""  # of its devices
    numa: dict[int, int] = field(default_factory=dict)  # NUMA node by rank, where it matters: several of them, and no NVLink

    def fitting(self, need_bytes: int) -> int:
        """How many devices have so much free."""
        return len(self.free) - bisect_left(self.free, (need_bytes, _BELOW_ALL))

    def used_fitting(self, need_bytes: int) -> int:
        """How many of the devices in use have."""
        return len(self.used_free) - bisect_left(self.used_free, (need_bytes, _BELOW_ALL))

    def without(self, ranks: Container[int]) -> Domain:
        """The same domain as if it had fewer devices."""
        free, used_free = ([entry for entry in listed if -entry[1] not in ranks] for listed in (self.free, self.used_free))
        return Domain(self.key, self.kind, self.index, free, self.used, used_free, self.sort, self.type, self.numa)

    def most_free(self, count: int, need_bytes: int) -> tuple[list[tuple[int, int]], bool]:
        """(`count` of its devices, whether they are apart): the most free ones, of one NUMA node where one has so many."""
        if count > 1 and self.numa:
            parts = []
            for node in sorted(set(self.numa.values())):
                part = [entry for entry in self.free if self.numa[-entry[1]] == node][-count:]
                if len(part) == count and part[0][0] >= need_bytes:
                    parts.append(part)
            if parts:
                return max(parts, key=lambda part: part[0][0]), False
            return self.free[-count:], True
        return self.free[-count:], False


class FreeMemory:
    """Reservations change it; nothing else does. Cordoned and unhealthy devices are not in it."""

    def __init__(self, devices: Iterable[Device]) -> None:
        self._free: dict[tuple[str, int], int] = {}
        self._domain_of: dict[tuple[str, int], Domain] = {}
        self._groups: dict[tuple[str, int], int] = {}  # reservations by device
        domains: dict[DomainKey, Domain] = {}
        for device in devices:
            if not device.healthy or device.cordoned:
                continue
            key = (device.pool, device.node, device.nvlink_domain)
            domain = domains.get(key)
            if domain is None:
                domain = domains[key] = Domain(key, device.kind, type=device.type)
            place = (device.pool, device.rank)
            self._domain_of[place] = domain
            self._free[place] = max(0, device.capacity_bytes - device.foreign_bytes)
            domain.free.append((self._free[place], -device.rank))
            domain.numa[device.rank] = device.numa
        self.pools: dict[str, list[Domain]] = {}
        self.domains = [domains[key] for key in sorted(domains)]
        sorts: dict[tuple, int] = {}
        for index, domain in enumerate(self.domains):
            domain.index = index
            domain.free.sort()
            nodes = set(domain.numa.values())
            if domain.key[2] or len(nodes) == 1 or -1 in nodes:
                domain.numa = {}
            likeness = (domain.type, *((amount, domain.numa.get(-rank)) for amount, rank in domain.free))
            domain.sort = sorts.setdefault(likeness, len(sorts))
            self.pools.setdefault(domain.key[0], []).append(domain)
        self._stale: set[Domain] = set()  # whose lists are behind `_free`
        self._in_use: dict[str, set[Domain]] = {}  # by kind
        self._unused: dict[str, dict[int, list[int]]] = {}  # kind -> sort -> indices of the domains, ascending
        for domain in self.domains:
            self._in_use.setdefault(domain.kind, set())
            self._unused.setdefault(domain.kind, {}).setdefault(domain.sort, []).append(domain.index)
        # (kind, degree) -> the degree-th largest free amount of every domain that has so many devices, with -index
        self._ranking: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._ranked: dict[tuple[str, int], list[int]] = {}  # the amount under which each domain is listed there

    def of(self, pool: str, rank: int) -> int | None:
        """Free bytes of a device; None when it takes no new ranks."""
        return self._free.get((pool, rank))

    def domain(self, pool: str, rank: int) -> Domain | None:
        return self._domain_of.get((pool, rank))

    def reserve(self, pool: str, ranks: Iterable[int], sizes: Iterable[int]) -> bool:
        """All or none: False, and nothing changed, when one of the devices has too little."""
        wanted = list(zip(ranks, sizes, strict=True))
        if any(self._free.get((pool, rank), -1) < size for rank, size in wanted):
            return False
        for rank, size in wanted:
            self._change((pool, rank), -size, 1)
        return True

    def release(self, pool: str, ranks: Iterable[int], sizes: Iterable[int]) -> None:
        """Give back what was reserved."""
        for rank, size in zip(ranks, sizes, strict=True):
            self._change((pool, rank), size, -1)

    def withhold(self, pool: str, rank: int, size: int) -> None:
        """So much of what is free of a device, or all."""
        if amount := min(size, self._free.get((pool, rank), 0)):
            self._change((pool, rank), -amount, 0)

    def _change(self, place: tuple[str, int], delta_bytes: int, groups: int) -> None:
        self._free[place] += delta_bytes
        count = self._groups[place] = self._groups.get(place, 0) + groups
        domain = self._domain_of[place]
        if count:
            domain.used.add(place[1])
        else:
            domain.used.discard(place[1])
        self._stale.add(domain)

    def settle(self) -> None:
        """Bring the ordered lists up to date; whoever reads them calls it first."""
        for domain in self._stale:
            pool = domain.key[0]
            domain.free = sorted((self._free[pool, -rank], rank) for _, rank in domain.free)
            domain.used_free = [entry for entry in domain.free if -entry[1] in domain.used]
            self._file(domain)
            for key, ranking in self._ranking.items():
                if key[0] == domain.kind and len(domain.free) >= key[1]:
                    listed = self._ranked[key]
                    amount = domain.free[-key[1]][0]
                    if amount != listed[domain.index]:
                        del ranking[bisect_left(ranking, (listed[domain.index], -domain.index))]
                        insort(ranking, (amount, -domain.index))
                        listed[domain.index] = amount
        self._stale.clear()

    def _file(self, domain: Domain) -> None:
        in_use, unused = self._in_use[domain.kind], self._unused[domain.kind][domain.sort]
        if domain.used and domain not in in_use:
            in_use.add(domain)
            del unused[bisect_left(unused, domain.index)]
        elif not domain.used and domain in in_use:
            in_use.remove(domain)
            insort(unused, domain.index)

    def in_use(self, kind: str) -> Iterable[Domain]:
        """Domains with a reservation, in no order."""
        self.settle()
        return self._in_use.get(kind, ())

    def unused(self, kind: str) -> Iterator[Iterator[Domain]]:
        """The others, those that are alike together, by index."""
        self.settle()
        for indices in self._unused.get(kind, {}).values():
            yield (self.domains[index] for index in indices)

    def ranking(self, kind: str, degree: int) -> list[tuple[int, int]]:
        """Ascending (bytes that `degree` devices of the domain have free each, -domain index) of all domains of a kind."""
        self.settle()
        key = (kind, degree)
        if key not in self._ranking:
            listed = [0] * len(self.domains)
            for domain in self.domains:
                if domain.kind == kind and len(domain.free) >= degree:
                    listed[domain.index] = domain.free[-degree][0]
            self._ranked[key] = listed
            self._ranking[key] = sorted(
                (listed[domain.index], -domain.index)
                for domain in self.domains
                if domain.kind == kind and len(domain.free) >= degree
            )
        return self._ranking[key]

    def devices(self, pool: str) -> Iterator[tuple[int, int, Domain]]:
        """(rank, free bytes, domain) of a pool's devices."""
        self.settle()
        for domain in self.pools.get(pool, ()):
            for free, negative_rank in domain.free:
                yield -negative_rank, free, domain

    def used_devices(self) -> int:
        return sum(len(domain.used) for domain in self.domains)
