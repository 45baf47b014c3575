"""How much host memory the parked models of each rank may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.api.config import PoolSpec
from workers.messages import Welcome

SHARE = 0.5
"""Of what a node has left: the page cache, other processes and other pools live there too."""


def standby_capacities(spec: PoolSpec, capacities: Sequence[int], welcomes: Mapping[int, Welcome]) -> dict[int, int]:
    """Bytes by rank: what the pool was configured with, or more where there is more. Ranks of one node share what is left of it
    beside their arenas, where these are host memory too.
    """
    found = {}
    for rank, welcome in welcomes.items():
        beside = [other for other, seen in welcomes.items() if seen.node == welcome.node]
        arenas = sum(capacities[other] for other in beside) if spec.device == "cpu" else 0
        left = min(welcomes[other].host_bytes for other in beside) - arenas
        found[rank] = max(spec.standby, int(left * SHARE) // len(beside))
    return found
