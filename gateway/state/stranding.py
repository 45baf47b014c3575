"""No change leaves a route that answers now without a target that will (rule 8), whichever object it changes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from gateway.api.config import Manifest, ModelSpec, PoolSpec, RouteSpec
from gateway.api.errors import ErrorCode, YardError
from gateway.api.records import GatewayRecord, GroupRecord, PoolRecord
from gateway.state.edits import Write, parse_document, parsed_site
from gateway.state.pool_gate import needs
from gateway.state.route_gate import Readiness
from gateway.state.snapshot import ObjectKey, Snapshot

Site = Mapping[ObjectKey, Manifest]


def not_stranding(
    edit: Callable[[Snapshot], Sequence[Write]], pools: Mapping[str, PoolRecord], gateways: Mapping[str, GatewayRecord]
) -> Callable[[Snapshot], Sequence[Write]]:
    """The same edit, refused with YardError(CONFLICT) that names the routes and the fix."""

    def checked(snapshot: Snapshot) -> Sequence[Write]:
        writes = edit(snapshot)
        changed = {write.key for write in writes if write.action != "unchanged"}
        if any(key.kind in ("Model", "Pool", "Route") for key in changed):
            before = parsed_site(snapshot)
            after = {key: manifest for key, manifest in before.items() if key not in changed}
            after |= {
                write.key: parse_document(write.document)
                for write in writes
                if write.key in changed and write.document is not None
            }
            readiness = Readiness(pools.values(), gateways.values())
            if problems := list(_problems(before, after, pools, readiness)):
                raise YardError(ErrorCode.CONFLICT, "\n".join(problems), field="spec")
        return writes

    return checked


def _problems(before: Site, after: Site, pools: Mapping[str, PoolRecord], readiness: Readiness) -> Iterator[str]:
    for key, manifest in sorted(after.items()):
        had = before.get(key)
        if not isinstance(manifest.spec, RouteSpec) or had is None or not isinstance(had.spec, RouteSpec):
            continue
        answering = [model for model in _answerers(had.spec) if readiness.answers(model)]
        reasons = {model: _lost(model, after, pools) for model in _answerers(manifest.spec) if readiness.answers(model)}
        # Who is on its way out already, by force, is no reason to refuse what comes after.
        if any(not _lost(model, before, pools) for model in answering) and all(reasons.values()):
            stories = [f"`{model}`: {readiness.story(model)}" for model in _answerers(manifest.spec) if model not in reasons]
            causes = "; ".join([*(reason for reason in reasons.values() if reason), *stories])
            yield f"{key} answers now, and would have no ready target: {causes}, or use --force"


def _answerers(spec: RouteSpec) -> list[str]:
    return [*(target.model for target in spec.targets if target.weight), *spec.fallback]


def _lost(name: str, after: Site, pools: Mapping[str, PoolRecord]) -> str:
    """Why the model would serve nowhere after the change, and what to do; empty when it goes on or finds another place."""
    manifest = after.get(ObjectKey("Model", name))
    if manifest is None or not isinstance(manifest.spec, ModelSpec):
        return f"`{name}` would be gone; give the route another target that is ready"
    if not manifest.spec.replicas:
        return f"`{name}` would have no replicas; raise its replicas, or give the route another target that is ready"
    if not manifest.spec.is_managed:
        return ""
    allowed = [key.name for key in after if key.kind == "Pool" and key.name in (manifest.spec.pools or (key.name,))]
    held = [(record, group) for record in pools.values() for group in record.groups if group.model == name]
    cordoned = {pool: _cordoned(pool, after) for pool in allowed}
    staying = [(record, group) for record, group in held if record.pool in allowed and group.state in ("ready", "parked")]
    if any(cordoned[record.pool].isdisjoint(group.ranks) for record, group in staying):
        return ""
    known = [key for key in after if key.kind == "Pool"]
    running = [pools[pool] for pool in allowed if pool in pools]
    if not known or any(_has_room(other, cordoned[other.pool], record, group) for other in running for record, group in held):
        return ""
    if staying:
        record, group = staying[0]
        ranks = ", ".join(map(str, sorted(cordoned[record.pool].intersection(group.ranks))))
        return (
            f"`{name}` is on rank {ranks} of pool `{record.pool}`, and finds no room elsewhere; make some, or cordon fewer ranks"
        )
    where = f"pool {', '.join(sorted(allowed))}" if allowed else "any pool"
    return f"`{name}` would find no room in {where}; make room there first, or keep the pool that it is in"


def _cordoned(pool: str, site: Site) -> frozenset[int]:
    spec = site[ObjectKey("Pool", pool)].spec
    return frozenset(spec.cordoned if isinstance(spec, PoolSpec) else ())


def _has_room(other: PoolRecord, cordoned: frozenset[int], home: PoolRecord, group: GroupRecord) -> bool:
    """Whether as many ranks of the other pool have free what the group holds on each of its own."""
    ledgers = [rank.ledger for rank in home.ranks if rank.index in group.ranks]
    wanted = max((sum(size for model, _, size in ledger if model == group.model) for ledger in ledgers), default=0)
    able = [rank for rank in other.ranks if rank.alive and rank.index not in cordoned]
    free = [rank for rank in able if rank.capacity_bytes - needs(rank)[0] >= wanted]
    return len(free) >= len(group.ranks)
