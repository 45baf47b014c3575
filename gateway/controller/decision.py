"""What the controller does next: a pure function of what is desired, what is observed and what was placed before (rule 2).

A pool is *open* when it is desired and its application runs with the desired specification (or is not there yet).
It is *closing* when it is not desired, or its application runs with another specification: it takes no groups, its groups
drain, then its application is deleted; a desired one is then absent and is deployed again.

    1. Sort the pools into open and closing.
    2. Hold the groups that cannot be judged now: their pool or their checkpoint is out of sight, for LOST_S at most.
    3. Place the models on the open pools' devices; what is placed and fits stays where it is.
    4. Let a group that has to move linger until one of its model's new groups serves, where memory allows it.
    5. Deploy and delete applications; tell every pool in sight its whole list, if it has not confirmed that list.
    6. Say why models are nowhere, and report what changed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from gateway.api.proto.pool_pb2 import Assignment, Group
from gateway.controller.model_requests import AskedModel
from gateway.controller.pool_digest import runs
from gateway.controller.situation import (
    Action,
    AppSight,
    Assign,
    Decision,
    DeletePool,
    DeployPool,
    Desired,
    Emit,
    Observed,
    Placed,
    PoolSight,
    ReleaseDevices,
)
from gateway.state.view import PoolEntry
from placement.footprint import group_footprint
from placement.free_memory import FreeMemory
from placement.packing import place
from placement.types import Device, ModelRequest, PlacedGroup, Plan, Snapshot

LOST_S = 30.0
"""A pool or a rank gone for less is expected back: a restarted driver adopts its ranks, a group restarts as one."""
DRAIN_S = 60.0
START_DEADLINE_S = 90.0
REASSERT_S = 15.0
REDEPLOY_S = 30.0


def decide(desired: Desired, observed: Observed, placed: Placed) -> Decision:
    """See the page above. Must not log, wait or read a clock."""
    # 1.
    open_pools = {name: entry for name, entry in desired.pools.items() if not _must_close(entry, observed.apps.get(name))}
    known = adopted(observed, desired) if placed.groups is None else placed.groups
    # 2.
    held = [group for group in known if _held(group, desired, open_pools, observed)]
    # 3.
    sights = {name: observed.pools[name] for name in open_pools if name in observed.pools}
    movable = [group for group in known if group not in held and group.model in desired.models]
    plan = place(snapshot_of(desired.models, sights, movable, held))
    # 4.
    lingering = _lingering(plan, movable, desired, observed, sights)
    groups = _sorted((*plan.groups, *held, *lingering))
    # 5.
    actions: list[Action] = list(_app_actions(desired, observed, open_pools, groups))
    actions += _assigns(groups, desired, observed, placed)
    # 6.
    waiting = pool_troubles(desired, observed)
    unplaced = _unplaced(plan, desired, waiting)
    events = _events(groups, unplaced, known, placed, desired)
    return Decision(groups, unplaced, tuple(actions), events, "; ".join(waiting[name] for name in sorted(waiting)), plan)


def snapshot_of(
    models: Mapping[str, AskedModel],
    sights: Mapping[str, PoolSight],
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
        replace(asked.request, replicas=max(0, asked.request.replicas - held_replicas[name]))
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
            foreign_bytes=sum(size for _, kind, size in rank.ledger if kind == "foreign") + held_bytes[name, rank.index],
            healthy=sight.missing_s < LOST_S and (rank.alive or sight.dead_s.get(rank.index, 0.0) < LOST_S),
        )
        for name, sight in sights.items()
        for rank in sight.record.ranks
    ]
    kinds = {(device.pool, device.rank): device.kind for device in devices}
    asked_for = {request.name: request for request in requests}
    return Snapshot(tuple(devices), tuple(requests), tuple(_resized(group, asked_for, kinds) for group in placed))


def adopted(observed: Observed, desired: Desired) -> tuple[PlacedGroup, ...]:
    """What the pools say they hold: the placement, when none is stored."""
    found = set()
    for name, sight in observed.pools.items():
        for group in sight.record.groups:
            asked = desired.models.get(group.model)
            if asked is None or asked.request is None or group.state == "draining":
                continue
            split = (group.tensor_parallel, group.pipeline_parallel)
            sizes = _bytes_per_rank(asked.request, *split, sight.record.device)
            found.add(PlacedGroup(group.model, name, group.ranks, *split, sizes))
    return _sorted(found)


def pool_troubles(desired: Desired, observed: Observed) -> dict[str, str]:
    """Desired pools that do not serve, and why."""
    troubles = {}
    for name, entry in desired.pools.items():
        sight, app = observed.pools.get(name), observed.apps.get(name)
        if sight is not None and sight.missing_s == 0:
            if sight.record.message:
                troubles[name] = f"pool `{name}`: {sight.record.message}"
        elif sight is not None:
            troubles[name] = f"pool `{name}`: no heartbeat for {sight.missing_s:.0f} s"
        elif app is None:
            troubles[name] = f"pool `{name}` is about to be deployed"
        elif app.status == "DEPLOYING" and app.age_s < START_DEADLINE_S:
            troubles[name] = f"pool `{name}` is starting"
        else:
            needs = f"{entry.spec.devices} × {entry.spec.device}"
            why = app.message or f"no heartbeat since its application was deployed; see `ray status` for room for {needs}"
            troubles[name] = f"pool `{name}` did not come up in {app.age_s:.0f} s ({app.status}): {why}"
    return troubles


def _must_close(entry: PoolEntry | None, app: AppSight | None) -> bool:
    return entry is None or (app is not None and not runs(app.deployment, entry.spec))


def _held(group: PlacedGroup, desired: Desired, open_pools: Mapping[str, PoolEntry], observed: Observed) -> bool:
    asked = desired.models.get(group.model)
    if asked is None or group.pool not in open_pools:
        return False
    sight = observed.pools.get(group.pool)
    if sight is None:
        return observed.watching_s < LOST_S
    return asked.request is None and sight.missing_s < LOST_S


def _resized(group: PlacedGroup, requests: Mapping[str, ModelRequest], kinds: Mapping[tuple[str, int], str]) -> PlacedGroup:
    """With the bytes that its model asks for now, which may have changed since it was placed."""
    request, kind = requests.get(group.model), kinds.get((group.pool, group.ranks[0]))
    if request is None or kind is None:
        return group
    return replace(group, bytes_per_rank=_bytes_per_rank(request, group.tensor_parallel, group.pipeline_parallel, kind))


def _bytes_per_rank(request: ModelRequest, tensor: int, pipeline: int, kind: str) -> tuple[int, ...]:
    stages = group_footprint(request, tensor, pipeline, kind)
    return tuple(stage.total for stage in stages for _ in range(tensor))


def _lingering(
    plan: Plan, movable: list[PlacedGroup], desired: Desired, observed: Observed, sights: Mapping[str, PoolSight]
) -> list[PlacedGroup]:
    """Groups that have to go, of models whose new groups do not serve yet and still may, or may get a place soon."""
    # Also kept groups count: one that was loaded to replace another is among them in the next pass.
    coming = Counter(group.model for group in plan.groups if _state(group, observed) not in ("ready", "draining", "failed"))
    starting = [name for name in desired.pools if _is_starting(name, observed)]
    for name in plan.refusals:
        pools = desired.models[name].spec.pools
        coming[name] += any(not pools or pool in pools for pool in starting)
    snapshot = snapshot_of(desired.models, sights, ())
    free = FreeMemory(snapshot.devices)
    for group in plan.groups:
        free.reserve(group.pool, group.ranks, group.bytes_per_rank)
    stay = []
    for group in plan.unloads:
        sight = observed.pools.get(group.pool)
        serving = sight is not None and sight.missing_s == 0 and _state(group, observed) == "ready"
        if not serving or not coming[group.model]:
            continue
        if group.pool in sights and not free.reserve(group.pool, group.ranks, group.bytes_per_rank):
            continue
        coming[group.model] -= 1
        stay.append(group)
    return stay


def _is_starting(pool: str, observed: Observed) -> bool:
    app = observed.apps.get(pool)
    return pool not in observed.pools and (app is None or (app.status == "DEPLOYING" and app.age_s < START_DEADLINE_S))


def _state(group: PlacedGroup, observed: Observed) -> str:
    """State of a placed group as its pool reports it; empty when it is not reported."""
    sight = observed.pools.get(group.pool)
    states = [
        seen.state
        for seen in (sight.record.groups if sight else ())
        if (seen.model, seen.ranks, seen.tensor_parallel) == (group.model, group.ranks, group.tensor_parallel)
    ]
    return "ready" if "ready" in states else states[0] if states else ""


def _app_actions(
    desired: Desired, observed: Observed, open_pools: Mapping[str, PoolEntry], groups: tuple[PlacedGroup, ...]
) -> Iterable[Action]:
    occupied = {group.pool for group in groups}
    for name in sorted(desired.pools.keys() | observed.apps.keys() | observed.devices_held):
        app = observed.apps.get(name)
        if app is None:
            if name in desired.pools:
                yield DeployPool(name)
            elif name in observed.devices_held:
                yield ReleaseDevices(name)
        elif app.status == "DELETING" or (name not in desired.pools and not app.deployment):
            continue  # Going already, or not an application of ours.
        elif name in open_pools:
            if app.status == "DEPLOY_FAILED" and app.age_s >= REDEPLOY_S:
                yield DeployPool(name)
        else:
            sight = observed.pools.get(name)
            holds = sight is not None and sight.missing_s == 0 and bool(sight.record.groups)
            if app.closing_s >= DRAIN_S or not (holds or name in occupied):
                yield DeletePool(name)


def _assigns(groups: tuple[PlacedGroup, ...], desired: Desired, observed: Observed, placed: Placed) -> Iterable[Assign]:
    by_pool: dict[str, list[PlacedGroup]] = defaultdict(list)
    for group in groups:
        by_pool[group.pool].append(group)
    for name, sight in sorted(observed.pools.items()):
        if sight.missing_s > 0:
            continue
        record = sight.record
        wanted = _assignments(by_pool[name], desired)
        ack = placed.acks.get(name)
        confirmed = (
            ack is not None
            and (ack.incarnation, ack.fence, ack.assignments) == (record.incarnation, placed.fence, wanted)
            and ack.age_s < REASSERT_S
        )
        if not confirmed:
            yield Assign(name, record.endpoint, record.incarnation, wanted)


def _assignments(groups: Iterable[PlacedGroup], desired: Desired) -> tuple[bytes, ...]:
    by_model: dict[str, list[PlacedGroup]] = defaultdict(list)
    for group in groups:
        by_model[group.model].append(group)
    return tuple(
        Assignment(
            model=model,
            generation=desired.models[model].generation,
            spec_json=desired.models[model].spec.model_dump_json(),
            groups=[
                Group(ranks=group.ranks, tensor_parallel=group.tensor_parallel, pipeline_parallel=group.pipeline_parallel)
                for group in members
            ],
        ).SerializeToString(deterministic=True)
        for model, members in sorted(by_model.items())
    )


def _unplaced(plan: Plan, desired: Desired, troubles: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Model -> reasons: its own first, then of the pools it could use that are not up."""
    reasons: dict[str, tuple[str, ...]] = {}
    for name, asked in sorted(desired.models.items()):
        found = [asked.problem] if asked.request is None else [reason.message for reason in plan.refusals.get(name, ())]
        if found:
            found += [text for pool, text in sorted(troubles.items()) if not asked.spec.pools or pool in asked.spec.pools]
            reasons[name] = tuple(dict.fromkeys(found))
    return reasons


def _events(
    groups: tuple[PlacedGroup, ...],
    unplaced: Mapping[str, tuple[str, ...]],
    known: tuple[PlacedGroup, ...],
    placed: Placed,
    desired: Desired,
) -> tuple[Emit, ...]:
    before, after = _places(known), _places(groups)
    events = []
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name):
            continue
        if name in after:
            events.append(Emit("model.placed", f"Model/{name}", "; ".join(after[name])))
        elif name not in desired.models:
            events.append(Emit("model.removed", f"Model/{name}", f"was {'; '.join(before[name])}"))
    for name in sorted(unplaced.keys() - placed.unplaced.keys()):
        events.append(Emit("model.unplaced", f"Model/{name}", unplaced[name][0]))
    return tuple(events)


def _places(groups: Iterable[PlacedGroup]) -> dict[str, tuple[str, ...]]:
    places: dict[str, list[str]] = defaultdict(list)
    for group in groups:
        ranks = ", ".join(map(str, group.ranks))
        split = f"tensor {group.tensor_parallel} × pipeline {group.pipeline_parallel}"
        places[group.model].append(f"pool `{group.pool}`, ranks {ranks} ({split})")
    return {model: tuple(texts) for model, texts in places.items()}


def _sorted(groups: Iterable[PlacedGroup]) -> tuple[PlacedGroup, ...]:
    return tuple(sorted(groups, key=lambda group: (group.model, group.pool, group.ranks)))
