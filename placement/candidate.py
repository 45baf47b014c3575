"""What the packer knows of a model that it places and of a pool that it may place it in, while a plan is in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

from placement.footprint import group_footprint
from placement.free_memory import Domain
from placement.replicas import Replicas
from placement.speed import slo_problem
from placement.types import ModelRequest


@dataclass
class PoolFacts:
    name: str
    kind: str
    devices: int
    largest_domain: int


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


def pool_facts(name: str, domains: list[Domain]) -> PoolFacts:
    sizes = [len(domain.free) for domain in domains]
    return PoolFacts(name, domains[0].kind, sum(sizes), max(sizes))


def allowed(request: ModelRequest, pool: PoolFacts) -> bool:
    return (not request.pools or pool.name in request.pools) and request.device in (None, pool.kind)
