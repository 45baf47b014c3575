"""What an apply would come to: changes and placements, with nothing written."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from gateway.api.load_key import load_key
from gateway.api.proto.admin_pb2 import Placement
from gateway.api.records import DesiredObject, PoolRecord
from gateway.controller.decision import decide
from gateway.controller.footprints import Footprints, remember, with_measured
from gateway.controller.model_requests import Checkpoints
from gateway.controller.pool_digest import deployment_name
from gateway.controller.pool_restarts import future_pool, restarting
from gateway.controller.scaling import as_placed
from gateway.controller.situation import AppSight, Decision, Desired, Observed, Placed, PoolSight
from gateway.servers.engine_plan import with_engine_notes
from gateway.state.snapshot import Snapshot
from gateway.state.view import SiteView
from placement.changes import Change, changes
from placement.explain import why
from placement.footprint import common_type, measured_of
from placement.types import PlacedGroup

CHECKPOINT_WAIT_S = 20.0


class Planner:
    """Runs the controller's own decision over a site as it would be."""

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        self._checkpoints = Checkpoints(cache_dir)

    async def plan(
        self,
        before: Snapshot,
        after: Snapshot,
        pools: dict[str, PoolRecord],
        placed: tuple[PlacedGroup, ...] | None,
        footprints: Footprints = (),
    ) -> list[Placement]:
        """As the controller will act: pools that start anew first close, so that their groups leave; then all is placed again."""
        site, desired = await self._desired(after, placed, pools, footprints)
        specs = {name: entry.spec for name, entry in site.desired_pools.items()}
        old = SiteView()
        old.apply_desired(before)
        had = {name: entry.spec for name, entry in old.desired_pools.items()}
        closing = restarting(had, specs, pools)
        apps = {name: AppSight("RUNNING", deployment_name(had[name])) for name in closing}
        sights = _sights(site, pools)
        decision = decide(desired, Observed(pools=sights, apps=apps), Placed(groups=placed))
        generations = {name: entry.generation for name, entry in site.models.items()}
        reloading = {name for name in old.models.keys() & site.models.keys() if _reloads(old, site, name)}
        rows = _placements(decision, generations, pools, closing, reloading)
        if closing:
            left = tuple(group for group in decision.groups if group.pool not in closing)
            back = {name: future_pool(name, specs[name], pools[name]) for name in closing}
            sights |= {name: PoolSight(record) for name, record in back.items()}
            again = decide(desired, Observed(pools=sights), Placed(groups=left))
            gone = [row for row in rows if row.action != "none" and not (row.action == "keep" and row.pool in closing)]
            seen = {_place(row) for row in gone if row.action != "unload"}
            came = _placements(again, generations, {**pools, **back}, closing, reloading)
            rows = gone + [row for row in came if _place(row) not in seen]
        rows = await with_engine_notes(rows, site.models, pools, self._cache_dir)
        return rows + _elsewhere(site)

    async def why(
        self,
        model: str,
        site: Snapshot,
        pools: dict[str, PoolRecord],
        placed: tuple[PlacedGroup, ...] | None,
        footprints: Footprints = (),
    ) -> list[str]:
        """Of each group of a model that is placed, why it is there."""
        view, desired = await self._desired(site, placed, pools, footprints)
        decision = decide(desired, Observed(pools=_sights(view, pools)), Placed(groups=placed))
        snapshot = replace(decision.snapshot, placed=decision.groups)
        lines = []
        for group in decision.groups:
            if group.model == model:
                place = f"rank {', '.join(map(str, group.ranks))} of pool `{group.pool}`"
                lines += [f"{place}: {sentence}" for sentence in why(snapshot, group)]
        return lines + [note.message for note in decision.plan.notes.get(model, ())]

    async def _desired(
        self,
        after: Snapshot,
        placed: tuple[PlacedGroup, ...] | None,
        pools: dict[str, PoolRecord],
        footprints: Footprints,
    ) -> tuple[SiteView, Desired]:
        site = SiteView()
        site.apply_desired(after)
        try:
            async with asyncio.timeout(CHECKPOINT_WAIT_S):
                models = await self._checkpoints.settle(site.models)
        except TimeoutError:
            models = self._checkpoints.asked(site.models)
        models = with_measured(models, remember(footprints, pools.values()), pools.values())
        return site, Desired(as_placed(models, placed or ()), site.desired_pools)


def _elsewhere(site: SiteView) -> list[Placement]:
    """Servers that already run: nothing is loaded or unloaded for them."""
    return [
        Placement(model=name, action="external", reasons=[f"not managed: requests go to {entry.spec.source}"])
        for name, entry in site.models.items()
        if not entry.spec.is_managed
    ]


def _reloads(before: SiteView, after: SiteView, model: str) -> bool:
    return load_key(before.models[model].spec) != load_key(after.models[model].spec)


def _sights(site: SiteView, pools: dict[str, PoolRecord]) -> dict[str, PoolSight]:
    coming = {name: future_pool(name, entry.spec) for name, entry in site.desired_pools.items() if name not in pools}
    return {name: PoolSight(record) for name, record in {**pools, **coming}.items()}


def _placements(
    decision: Decision, generations: dict[str, int], pools: dict[str, PoolRecord], closing: dict[str, str], reloading: set[str]
) -> list[Placement]:
    loaded = {(group.model, group.generation) for pool in pools.values() for group in pool.groups}
    parked = {
        (group.model, pool.pool, group.ranks) for pool in pools.values() for group in pool.groups if group.residency == "parked"
    }
    standing_by = [group for group in decision.groups if (group.model, group.pool, group.ranks) in parked]
    rows = []
    for change in changes(decision.snapshot, decision.plan, standing_by):
        known = any(model == change.group.model for model, _ in loaded)
        changed = known and (change.group.model, generations.get(change.group.model)) not in loaded
        reasons = [note.message for note in decision.plan.notes.get(change.group.model, ())]
        if change.action == "keep" and changed and change.group.model in reloading:
            reasons.insert(
                0, "its specification changes, and not in place: the new one is loaded beside it, then the old one drains"
            )
        if change.action == "load" and _is_measured(change.group, decision):
            reasons.append("its memory is counted as it was measured at an earlier load")
        if change.path == "load" and (change.group.pool in closing or not _runs(pools.get(change.group.pool))):
            reasons.append(f"its seconds begin when the ranks of pool `{change.group.pool}` run, which start first")
        if change.before is not None:
            reasons.insert(0, f"from rank {', '.join(map(str, change.before.ranks))} of pool `{change.before.pool}`")
        touched = {change.group.pool, change.before.pool if change.before else ""}
        why_restarts = [closing[pool] for pool in sorted(touched & closing.keys())]
        reasons[:0] = why_restarts if change.action != "keep" else ()
        if change.action != "unload" or change.group not in decision.groups or why_restarts:
            rows.append(_row(change, reasons))
    seen = {_place(row) for row in rows}
    rows += [
        Placement(model=group.model, pool=group.pool, ranks=group.ranks, action="keep")
        for group in decision.groups
        if (group.model, group.pool, group.ranks) not in seen
    ]
    rows += [Placement(model=model, action="none", reasons=reasons) for model, reasons in decision.unplaced.items()]
    return rows


def _runs(pool: PoolRecord | None) -> bool:
    return pool is not None and bool(pool.incarnation) and all(rank.alive for rank in pool.ranks)


def _is_measured(group: PlacedGroup, decision: Decision) -> bool:
    devices = [each for each in decision.snapshot.devices if each.pool == group.pool and each.rank in group.ranks]
    request = next((each for each in decision.snapshot.models if each.name == group.model), None)
    if request is None or not devices:
        return False
    degrees = (group.tensor_parallel, group.pipeline_parallel)
    return measured_of(request, *degrees, devices[0].kind, common_type(each.type for each in devices)) is not None


def _place(row: Placement) -> tuple[str, str, tuple[int, ...]]:
    return row.model, row.pool, tuple(row.ranks)


def _row(change: Change, reasons: list[str]) -> Placement:
    return Placement(
        model=change.group.model,
        pool=change.group.pool,
        ranks=change.group.ranks,
        action=change.action,
        reasons=reasons,
        path=change.path or "",
        bytes=change.bytes,
        seconds=change.seconds,
        evicts=change.evicts,
        risks=change.risks,
        standby=change.group.standby,
    )


def after_writes(snapshot: Snapshot, documents: dict) -> Snapshot:
    """The snapshot with documents (by ObjectKey) stored, each with a generation of its own."""
    objects = dict(snapshot.objects)
    for key, document in documents.items():
        objects[key] = DesiredObject(key.kind, key.name, snapshot.generation(key) + 1, snapshot.revision + 1, document, 0.0)
    return Snapshot(snapshot.revision + 1, objects, snapshot.tombstones)
