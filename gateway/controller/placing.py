"""From what is desired and observed to what placement looks at. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from gateway.api.records import DEVICE
from gateway.controller.model_requests import AskedModel
from gateway.controller.situation import LOST_S, Desired, Observed, PoolSight
from gateway.state.view import PoolEntry
from placement.footprint import common_type, group_footprint
from placement.types import Device, ModelRequest, PlacedGroup, Snapshot


def snapshot_of(
    models: Mapping[str, AskedModel],
    sights: Mapping[str, PoolSight],
    pools: Mapping[str, PoolEntry],
    placed: Iterable[PlacedGroup],
    held: Iterable[PlacedGroup] = (),
) -> Snapshot:
    """What placement looks at. Held groups count as replicas that are there, and their memory as taken."""
    held_replicas = Counter(group.model for group in held)
    held_bytes: Counter[tuple[str, int]] = Counter()
    for group in held:
        for rank, size in zip(group.ranks, group.bytes_per_rank, strict=True):
            held_bytes[group.pool, rank] += size
    requests = [
        _where_its_engine_is(replace(asked.request, replicas=max(0, asked.request.replicas - held_replicas[name])), sights, pools)
        for name, asked in models.items()
        if asked.request is not None
    ]
    devices = [
        Device(
            pool=name,
            rank=rank.index,
            node=rank.node,
            kind=sight.record.device,
            capacity_bytes=rank.capacity_bytes,
            foreign_bytes=sum(size for *_, size in rank.taken) + held_bytes[name, rank.index],
            unaccounted_bytes=sum(size for owner, kind, size in rank.ledger if (owner, kind) == (DEVICE, "workspace")),
            healthy=sight.missing_s < LOST_S and (rank.alive or sight.dead_s.get(rank.index, 0.0) < LOST_S) and not rank.trouble,
            trouble=rank.trouble,
            cordoned=name in pools and rank.index in pools[name].spec.cordoned,
            nvlink_domain=rank.nvlink_domain,
            numa=rank.numa,
            standby_bytes=pools[name].spec.standby if name in pools else 0,
            engines=pools[name].spec.engines if name in pools else (),
            type=rank.type,
        )
        for name, sight in sights.items()
        for rank in sight.record.ranks
    ]
    sorts = {(device.pool, device.rank): (device.kind, device.type) for device in devices}
    asked_for = {request.name: request for request in requests}
    return Snapshot(tuple(devices), tuple(requests), tuple(_resized(group, asked_for, sorts) for group in placed))


def _where_its_engine_is(request: ModelRequest, sights: Mapping[str, PoolSight], pools: Mapping[str, PoolEntry]) -> ModelRequest:
    """Named pools, where some do not host its engine."""
    others = {name for name, entry in pools.items() if request.engine not in entry.spec.engines}
    if not others:
        return request
    left = tuple(name for name in request.pools or sorted(sights) if name not in others)
    return replace(request, pools=left or (f"one with {request.engine} in its engines",))


def adopted(observed: Observed, desired: Desired) -> tuple[PlacedGroup, ...]:
    """What the pools say they hold: the placement, when none is stored."""
    found = set()
    for name, sight in observed.pools.items():
        for group in sight.record.groups:
            asked = desired.models.get(group.model)
            if asked is None or group.state == "draining":
                continue
            split = (group.tensor_parallel, group.pipeline_parallel)
            # While its checkpoint is being read the group is held as it is; its bytes are filled in afterwards.
            sort = (sight.record.device, common_type(rank.type for rank in sight.record.ranks if rank.index in group.ranks))
            sizes = _bytes_per_rank(asked.request, *split, *sort) if asked.request else (0,) * len(group.ranks)
            found.add(PlacedGroup(group.model, name, group.ranks, *split, sizes, standby=group.state == "parked"))
    return in_order(found)


def in_order(groups: Iterable[PlacedGroup]) -> tuple[PlacedGroup, ...]:
    return tuple(sorted(groups, key=lambda group: (group.model, group.pool, group.ranks)))


def _resized(
    group: PlacedGroup, requests: Mapping[str, ModelRequest], sorts: Mapping[tuple[str, int], tuple[str, str]]
) -> PlacedGroup:
    """With the bytes that its model asks for now, which may have changed since it was placed."""
    request, first = requests.get(group.model), sorts.get((group.pool, group.ranks[0]))
    if request is None or first is None:
        return group
    sort = (first[0], common_type(sorts.get((group.pool, rank), first)[1] for rank in group.ranks))
    return replace(group, bytes_per_rank=_bytes_per_rank(request, group.tensor_parallel, group.pipeline_parallel, *sort))


def _bytes_per_rank(request: ModelRequest, tensor: int, pipeline: int, kind: str, type_: str) -> tuple[int, ...]:
    stages = group_footprint(request, tensor, pipeline, kind, type_)
    return tuple(stage.total for stage in stages for _ in range(tensor))
