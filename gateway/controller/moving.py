"""Groups that have to move go on serving until others do. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from gateway.controller.placing import snapshot_of
from gateway.controller.reasons import is_starting
from gateway.controller.situation import Desired, Observed, PoolSight
from placement.free_memory import FreeMemory
from placement.types import PlacedGroup, Plan


def lingering(
    plan: Plan, movable: list[PlacedGroup], desired: Desired, observed: Observed, sights: Mapping[str, PoolSight]
) -> list[PlacedGroup]:
    """Groups that have to go, of models whose new groups do not serve yet and still may, or may get a place soon. One that
    shares a device with a group that stays does not: that device serves its model already.
    """
    # Also kept groups count: one that was loaded to replace another is among them in the next pass.
    settled = ("ready", "parked", "draining", "failed")
    waiting = [group for group in plan.groups if _state(group, observed) not in settled]
    coming = Counter(group.model for group in waiting)
    staying = {(group.model, group.pool, rank) for group in set(plan.groups) - set(waiting) for rank in group.ranks}
    starting = [name for name in desired.pools if is_starting(name, observed)]
    for name in plan.refusals:
        pools = desired.models[name].spec.pools
        coming[name] += any(not pools or pool in pools for pool in starting)
    snapshot = snapshot_of(desired.models, sights, desired.pools, ())
    free = FreeMemory(snapshot.devices)
    for group in plan.groups:
        free.reserve(group.pool, group.ranks, group.bytes_per_rank)
    stay = []
    for group in plan.unloads:
        sight = observed.pools.get(group.pool)
        serving = sight is not None and sight.missing_s == 0 and _state(group, observed) == "ready"
        if not serving or not coming[group.model] or any((group.model, group.pool, rank) in staying for rank in group.ranks):
            continue
        if group.pool in sights and not free.reserve(group.pool, group.ranks, group.bytes_per_rank):
            continue
        coming[group.model] -= 1
        stay.append(group)
    return stay


def _state(group: PlacedGroup, observed: Observed) -> str:
    """State of a placed group as its pool reports it; empty when it is not reported."""
    sight = observed.pools.get(group.pool)
    states = [
        seen.state
        for seen in (sight.record.groups if sight else ())
        if (seen.model, seen.ranks, seen.tensor_parallel) == (group.model, group.ranks, group.tensor_parallel)
    ]
    return "ready" if "ready" in states else states[0] if states else ""
