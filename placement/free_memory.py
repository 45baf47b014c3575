"""Free bytes of every device that may take new ranks, ordered so that the best fitting ones are found without a scan.

A domain is what a tensor-parallel stage must stay inside: one pool, one node, one NVLink domain.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from placement.types import Device

DomainKey = tuple[str, str, str]  # pool, node, NVLink domain


@dataclass
class Domain:
    key: DomainKey
    kind: str
    # (free bytes, -rank), ascending: of equal ones the lowest rank comes last and is taken first by `most`.
    free: list[tuple[int, int]] = field(default_factory=list)

    def fitting(self, need_bytes: int) -> int:
        """How many devices have so much free."""
        return len(self.free) - bisect_left(self.free, (need_bytes, -(2**62)))


class FreeMemory:
    """Reservations change it; nothing else does. Cordoned and unhealthy devices are not in it."""

    def __init__(self, devices: Iterable[Device]) -> None:
        self._domain_of: dict[tuple[str, int], Domain] = {}
        self._free: dict[tuple[str, int], int] = {}
        self.domains: dict[DomainKey, Domain] = {}
        for device in devices:
            if not device.healthy or device.cordoned:
                continue
            key = (device.pool, device.node, device.nvlink_domain)
            domain = self.domains.setdefault(key, Domain(key, device.kind))
            self._domain_of[device.pool, device.rank] = domain
            free = max(0, device.capacity_bytes - device.foreign_bytes)
            self._free[device.pool, device.rank] = free
            domain.free.append((free, -device.rank))
        self.pools: dict[str, list[Domain]] = {}
        for key in sorted(self.domains):
            domain = self.domains[key]
            domain.free.sort()
            self.pools.setdefault(key[0], []).append(domain)

    def of(self, pool: str, rank: int) -> int | None:
        """Free bytes of a device; None when it takes no new ranks."""
        return self._free.get((pool, rank))

    def add(self, pool: str, rank: int, delta_bytes: int) -> None:
        """Positive: give back; negative: reserve. The caller has checked that it fits."""
        device = (pool, rank)
        domain, before = self._domain_of[device], self._free[device]
        if before + delta_bytes < 0:
            raise ValueError(f"rank {rank} of pool {pool}: {-delta_bytes} bytes reserved, {before} are free")
        del domain.free[bisect_left(domain.free, (before, -rank))]
        insort(domain.free, (before + delta_bytes, -rank))
        self._free[device] = before + delta_bytes

    def reserve(self, pool: str, ranks: Iterable[int], sizes: Iterable[int]) -> bool:
        """All or none: False, and nothing changed, when one of the devices has too little."""
        wanted = list(zip(ranks, sizes, strict=True))
        if any((self._free.get((pool, rank)) or 0) < size for rank, size in wanted):
            return False
        for rank, size in wanted:
            self.add(pool, rank, -size)
        return True

    def devices(self, pool: str) -> Iterator[tuple[int, int, Domain]]:
        """(rank, free bytes, domain) of a pool's devices."""
        for domain in self.pools.get(pool, ()):
            for free, negative_rank in domain.free:
                yield -negative_rank, free, domain
