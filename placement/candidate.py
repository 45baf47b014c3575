"""What the packer knows of a model that it places, while a plan is in the making."""

from __future__ import annotations

from collections.abc import Callable
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
