"""The pools of a site, as far as they decide where a model may go at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from placement.free_memory import Domain
from placement.types import Device, ModelRequest


@dataclass(frozen=True)
class PoolFacts:
    name: str
    kind: str
    devices: int
    largest_domain: int
    engines: tuple[str, ...]  # empty: all

    def allows(self, request: ModelRequest) -> bool:
        named = not request.pools or self.name in request.pools
        return named and request.device in (None, self.kind) and (not self.engines or request.engine in self.engines)


class Pools:
    def __init__(self, domains: Mapping[str, list[Domain]], devices: Iterable[Device]) -> None:
        engines = {device.pool: device.engines for device in devices}
        self._facts = {name: _facts(name, members, engines[name]) for name, members in domains.items()}
        # kind -> (largest domain, devices of the largest pool): what bounds the degrees to try
        self.bounds: dict[str, tuple[int, int]] = {}
        for pool in self._facts.values():
            domain, count = self.bounds.get(pool.kind, (0, 0))
            self.bounds[pool.kind] = (max(domain, pool.largest_domain), max(count, pool.devices))
        restricted = [frozenset(names) for names in engines.values() if names]
        self._run_everywhere = frozenset[str].intersection(*restricted) if restricted else None  # None: all engines

    def __iter__(self) -> Iterator[PoolFacts]:
        return iter(self._facts.values())

    def allows(self, name: str, request: ModelRequest) -> bool:
        return name in self._facts and self._facts[name].allows(request)

    def candidates(self, request: ModelRequest, kind: str) -> list[PoolFacts]:
        pools = (self._facts[name] for name in sorted(request.pools or self._facts) if name in self._facts)
        return [pool for pool in pools if pool.kind == kind and pool.allows(request)]

    def is_choosy(self, request: ModelRequest) -> bool:
        """Not all devices of its kind are alike to it."""
        some = self._run_everywhere is not None and request.engine not in self._run_everywhere
        return some or bool(request.pools) or request.slo is not None or request.load is not None


def _facts(name: str, domains: list[Domain], engines: tuple[str, ...]) -> PoolFacts:
    sizes = [len(domain.free) for domain in domains]
    return PoolFacts(name, domains[0].kind, sum(sizes), max(sizes), engines)
