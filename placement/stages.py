"""Places for the stages of one pipeline inside one pool."""

from __future__ import annotations

from dataclasses import dataclass

from placement.free_memory import Domain
from placement.scoring import Closeness, Policy


@dataclass(frozen=True)
class StagePlaces:
    # (stages on nodes that hold this model already, nodes or NVLink domains used, stages over several NUMA nodes, the stages' own
    # scores added up)
    score: tuple[int, ...]
    ranks: tuple[int, ...]  # stage-major


def place_stages(
    domains: list[Domain], tensor_parallel: int, sizes: tuple[int, ...], policy: Policy, closeness: Closeness
) -> StagePlaces | None:
    """`sizes`: bytes on each rank of every stage. The largest stage first, each on ranks of its own; neighbours stay in one
    domain where it has room. Nothing is reserved.
    """
    if sum(domain.fitting(min(sizes)) // tensor_parallel for domain in domains) < len(sizes):
        return None
    rest = {domain.key: domain for domain in domains}
    chosen: dict[int, tuple[int, ...]] = {}
    homes: set[tuple[str, str, str]] = set()
    near = apart = 0
    scores: list[tuple[int, ...]] = []
    for stage in sorted(range(len(sizes)), key=lambda stage: (-sizes[stage], stage)):
        at_home = [rest[key] for key in sorted(homes)]
        away = [domain for key, domain in rest.items() if key not in homes]
        spots = policy.among(at_home, tensor_parallel, sizes[stage]) or policy.among(away, tensor_parallel, sizes[stage])
        if not spots:
            return None
        spot = min(spots, key=lambda spot: (closeness(spot.domain), spot.apart, spot.score, spot.domain.index))
        chosen[stage] = spot.ranks
        rest[spot.domain.key] = spot.domain.without(spot.ranks)
        homes.add(spot.domain.key)
        near += closeness(spot.domain)[0]
        apart += spot.apart
        scores.append(spot.score)
    total = [sum(parts) for parts in zip(*scores, strict=True)]
    return StagePlaces((near, len(homes), apart, *total), tuple(rank for stage in range(len(sizes)) for rank in chosen[stage]))
