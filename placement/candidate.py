"""What the packer knows of a model that it places and of a pool that it may place it in, while a plan is in the making."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from placement.footprint import group_footprint
from placement.free_memory import Domain
from placement.replicas import Replicas
from placement.speed import slo_problem
from placement.types import ModelRequest

Order = Callable[[ModelRequest, int], tuple]
"""(request, bytes on a single rank) -> sort key."""


def total_bytes(request: ModelRequest, single_rank_bytes: int) -> tuple:
    return (-single_rank_bytes,)


@dataclass
class PoolFacts:
    name: str
    kind: str
    devices: int
    largest_domain: int
    engines: tuple[str, ...] = ()


@dataclass
class Candidate:
    request: ModelRequest
    replicas: Replicas = field(default_factory=Replicas)
    placed: int = 0  # groups
    sizes: dict[tuple[int, int, str], tuple[int, ...]] = field(default_factory=dict)
    slow: dict[tuple[int, int, str, str], str] = field(default_factory=dict)

    def stage_bytes(self, tensor_parallel: int, pipeline_parallel: int, kind: str) -> tuple[int, ...]:
        """Bytes on each rank of every stage."""
        key = (tensor_parallel, pipeline_parallel, kind)
        if key not in self.sizes:
            self.sizes[key] = tuple(stage.total for stage in group_footprint(self.request, *key))
        return self.sizes[key]

    def slo_problem(self, tensor_parallel: int, pipeline_parallel: int, domain: Domain) -> str:
        if self.request.slo is None:
            return ""
        key = (tensor_parallel, pipeline_parallel, domain.kind, domain.type)
        if key not in self.slow:
            self.slow[key] = slo_problem(self.request, *key)
        return self.slow[key]

    def difficulty(self, order: Order) -> tuple:
        """Sort key of the order in which models are placed."""
        request = self.request
        single = sum(self.stage_bytes(1, 1, request.device or "cuda"))
        return -request.priority, not request.pinned, *order(request, single), request.name


def pool_facts(name: str, domains: list[Domain], engines: tuple[str, ...] = ()) -> PoolFacts:
    sizes = [len(domain.free) for domain in domains]
    return PoolFacts(name, domains[0].kind, sum(sizes), max(sizes), engines)


def allowed(request: ModelRequest, pool: PoolFacts) -> bool:
    named = not request.pools or pool.name in request.pools
    return named and request.device in (None, pool.kind) and (not pool.engines or request.engine in pool.engines)


def degree_bounds(pools: Iterable[PoolFacts]) -> dict[str, tuple[int, int]]:
    """kind -> (largest domain, devices of the largest pool): what bounds the degrees to try."""
    bounds: dict[str, tuple[int, int]] = {}
    for pool in pools:
        domain, devices = bounds.get(pool.kind, (0, 0))
        bounds[pool.kind] = (max(domain, pool.largest_domain), max(devices, pool.devices))
    return bounds


def engines_everywhere(engines: Iterable[tuple[str, ...]]) -> frozenset[str] | None:
    """Of the engines of each pool, those that all of them have; None: any."""
    restricted = [frozenset(names) for names in engines if names]
    return frozenset[str].intersection(*restricted) if restricted else None


def is_choosy(request: ModelRequest, run_everywhere: frozenset[str] | None) -> bool:
    """Not all devices of its kind are alike to it."""
    some = run_everywhere is not None and request.engine not in run_everywhere
    return some or bool(request.pools) or request.slo is not None or request.load is not None
