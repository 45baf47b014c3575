"""What an apply would come to: changes and placements, with nothing written."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from gateway.api.config import PoolSpec
from gateway.api.proto.admin_pb2 import Placement
from gateway.api.records import DesiredObject, PoolRecord, RankRecord
from gateway.controller.decision import decide
from gateway.controller.model_requests import Checkpoints
from gateway.controller.scaling import as_placed
from gateway.controller.situation import Decision, Desired, Observed, Placed, PoolSight
from gateway.servers.engine_plan import with_engine_notes
from gateway.state.snapshot import Snapshot
from gateway.state.view import SiteView
from placement.changes import Change, changes
from placement.explain import why
from placement.types import PlacedGroup

CHECKPOINT_WAIT_S = 20.0


class Planner:
    """Runs the controller's own decision over a site as it would be."""

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        self._checkpoints = Checkpoints(cache_dir)

    async def plan(
        self, after: Snapshot, pools: dict[str, PoolRecord], placed: tuple[PlacedGroup, ...] | None
    ) -> list[Placement]:
        site, decision = await self._decide(after, pools, placed)
        rows = _placements(decision, {name: entry.generation for name, entry in site.models.items()}, pools)
        return await with_engine_notes(rows, site.models, pools, self._cache_dir)

    async def why(
        self, model: str, site: Snapshot, pools: dict[str, PoolRecord], placed: tuple[PlacedGroup, ...] | None
    ) -> list[str]:
        """Of each group of a model that is placed, why it is there."""
        _, decision = await self._decide(site, pools, placed)
        snapshot = replace(decision.snapshot, placed=decision.groups)
        lines = []
        for group in decision.groups:
            if group.model == model:
                place = f"rank {', '.join(map(str, group.ranks))} of pool `{group.pool}`"
                lines += [f"{place}: {sentence}" for sentence in why(snapshot, group)]
        return lines + [note.message for note in decision.plan.notes.get(model, ())]

    async def _decide(
        self, after: Snapshot, pools: dict[str, PoolRecord], placed: tuple[PlacedGroup, ...] | None
    ) -> tuple[SiteView, Decision]:
        site = SiteView()
        site.apply_desired(after)
        try:
            async with asyncio.timeout(CHECKPOINT_WAIT_S):
                models = await self._checkpoints.settle(site.models)
        except TimeoutError:
            models = self._checkpoints.asked(site.models)
        sights = {name: PoolSight(record) for name, record in pools.items()}
        for name, entry in site.desired_pools.items():
            if name not in sights:
                sights[name] = PoolSight(future_pool(name, entry.spec))
        models = as_placed(models, placed or ())
        return site, decide(Desired(models, site.desired_pools), Observed(pools=sights), Placed(groups=placed))


def future_pool(name: str, spec: PoolSpec) -> PoolRecord:
    """A pool as it will report itself once it runs. Without `memory` its devices are not known before."""
    devices = range(spec.devices) if spec.memory is not None else ()
    ranks = tuple(RankRecord(index, f"(a node for {name})", 0, spec.device, spec.memory or 0) for index in devices)
    message = "" if ranks else "its devices are known once it runs; give `memory` to plan before that"
    return PoolRecord(name, "", "", "", 0, spec.device, 0, 0, 0.0, ranks=ranks, message=message)


def _placements(decision: Decision, generations: dict[str, int], pools: dict[str, PoolRecord]) -> list[Placement]:
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
        if change.action == "keep" and changed:
            reasons.insert(
                0, "its specification changes; what cannot change in place is loaded beside it, then the old one drains"
            )
        if change.before is not None:
            reasons.insert(0, f"from rank {', '.join(map(str, change.before.ranks))} of pool `{change.before.pool}`")
        if change.action != "unload" or change.group not in decision.groups:
            rows.append(_row(change, reasons))
    seen = {(change.model, change.pool, tuple(change.ranks)) for change in rows}
    rows += [
        Placement(model=group.model, pool=group.pool, ranks=group.ranks, action="keep")
        for group in decision.groups
        if (group.model, group.pool, group.ranks) not in seen
    ]
    rows += [Placement(model=model, action="none", reasons=reasons) for model, reasons in decision.unplaced.items()]
    return rows


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
