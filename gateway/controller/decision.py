"""What the controller does next: a pure function of what is desired, what is observed and what was placed before (rule 2).

A pool is *open* when it is desired and its application runs with the desired specification (or is not there yet).
It is *closing* when it is not desired, or its application runs with another specification: it takes no groups, its groups
drain, then its application is deleted; a desired one is then absent and is deployed again.

    1. Sort the pools into open and closing.
    2. Hold the groups that cannot be judged now: their pool or their checkpoint is out of sight, for LOST_S at most.
    3. Place the models on the open pools' devices; what is placed and fits stays where it is, unless it is idle and has to make
       room for what finds none.
    4. Let a group that has to move linger until one of its model's new groups serves, where memory allows it.
    5. Deploy and delete applications; tell every pool in sight its whole list, if it has not confirmed that list.
    6. Say why models are nowhere, and report what changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from gateway.api.proto.pool_pb2 import Assignment, Group
from gateway.api.records import PoolRecord
from gateway.controller.moving import lingering
from gateway.controller.placing import adopted, in_order, snapshot_of
from gateway.controller.pool_digest import runs
from gateway.controller.reasons import events_of, final_refusals, is_starting, pool_troubles, unplaced_models
from gateway.controller.situation import (
    DRAIN_S,
    LOST_S,
    REASSERT_S,
    REDEPLOY_S,
    Action,
    AppSight,
    Assign,
    Decision,
    DeletePool,
    DeployPool,
    Desired,
    Observed,
    Placed,
    ReleaseDevices,
)
from gateway.state.view import PoolEntry
from placement.footprint import common_type, measured_of
from placement.replanning import replan
from placement.types import PlacedGroup

_OF_SERVERS = {"tokenizer", "server"}
"""What a managed model cannot have; drivers of an older version, as in an upgrade, do not know it."""


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
    snapshot = snapshot_of(desired.models, sights, desired.pools, movable, held)
    plan = replan(snapshot, busy=_busy(observed) | _starting(desired, observed))
    # 4.
    staying = lingering(plan, movable, desired, observed, sights)
    groups = in_order((*plan.groups, *held, *staying))
    # 5.
    actions: list[Action] = list(_app_actions(desired, observed, open_pools, groups))
    actions += _assigns(groups, desired, observed, placed)
    # 6.
    waiting = pool_troubles(desired, observed)
    unplaced = unplaced_models(plan, desired, waiting)
    refused = final_refusals(unplaced, desired, observed)
    return Decision(
        groups=groups,
        unplaced=unplaced,
        refused=refused,
        actions=tuple(actions),
        events=events_of(groups, {name: unplaced[name] for name in refused - placed.refused}, known, desired),
        message="; ".join(waiting[name] for name in sorted(waiting)),
        plan=plan,
        snapshot=snapshot,
    )


def _busy(observed: Observed) -> frozenset[str]:
    """Models with requests in flight."""
    groups = (group for sight in observed.pools.values() for group in sight.record.groups)
    return frozenset(group.model for group in groups if group.running or group.waiting)


def _starting(desired: Desired, observed: Observed) -> frozenset[str]:
    """All models while a pool is on its way: it may bring the room that moves would make."""
    return frozenset(desired.models) if any(is_starting(name, observed) for name in desired.pools) else frozenset()


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
        wanted = _assignments(by_pool[name], desired, record)
        ack = placed.acks.get(name)
        confirmed = (
            ack is not None
            and (ack.incarnation, ack.fence, ack.assignments) == (record.incarnation, placed.fence, wanted)
            and ack.age_s < REASSERT_S
        )
        if not confirmed:
            yield Assign(name, record.endpoint, record.incarnation, wanted)


def _assignments(groups: Iterable[PlacedGroup], desired: Desired, record: PoolRecord) -> tuple[bytes, ...]:
    by_model: dict[str, list[PlacedGroup]] = defaultdict(list)
    for group in groups:
        by_model[group.model].append(group)
    return tuple(
        Assignment(
            model=model,
            generation=desired.models[model].generation,
            spec_json=desired.models[model].spec.model_dump_json(exclude=_OF_SERVERS),
            groups=[
                Group(
                    ranks=group.ranks,
                    tensor_parallel=group.tensor_parallel,
                    pipeline_parallel=group.pipeline_parallel,
                    measured_json=_measured(group, desired, record),
                )
                for group in members
            ],
        ).SerializeToString(deterministic=True)
        for model, members in sorted(by_model.items())
    )


def _measured(group: PlacedGroup, desired: Desired, record: PoolRecord) -> str:
    """By what it is counted here, so that its driver reserves the same."""
    request = desired.models[group.model].request
    if request is None:
        return ""
    type_ = common_type(rank.type for rank in record.ranks if rank.index in group.ranks)
    seen = measured_of(request, group.tensor_parallel, group.pipeline_parallel, record.device, type_)
    return "" if seen is None else msgspec.json.encode(seen).decode()
