"""What is observed of one object, and why it is as it is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.api.config import ModelSpec, PoolSpec, RouteSpec
from gateway.api.records import DesiredObject, RouteStatus
from gateway.state.edits import parse_document
from gateway.state.ranks_away import ranks_away
from gateway.state.route_gate import Readiness
from gateway.state.snapshot import ObjectKey, Observed, Snapshot

_OF_SERVERS = ("generation", "state", "reason", "context", "running", "ready_since_unix")
Description = tuple[dict[str, Any], list[str]]


def describe(stored: DesiredObject, snapshot: Snapshot, observed: Observed) -> Description:
    """(plain data of what is observed, reasons)."""
    match stored.kind:
        case "Model":
            return _model(stored, snapshot, observed)
        case "Route":
            return _route(stored, snapshot, observed)
        case "Pool":
            return _pool(stored, observed)
    return {}, []


def route_statuses(snapshot: Snapshot, observed: Observed) -> tuple[RouteStatus, ...]:
    readiness = Readiness(observed.pools.values(), observed.gateways.values())
    return tuple(
        RouteStatus(
            name=key.name,
            generation=stored.generation,
            targets=tuple((target.model, target.weight) for target in spec.targets),
            aliases=spec.aliases,
            ready=any(target.weight and readiness.answers(target.model) for target in spec.targets),
        )
        for key, stored in sorted(snapshot.objects.items())
        if key.kind == "Route" and isinstance(spec := parse_document(stored.manifest).spec, RouteSpec)
    )


def _model(stored: DesiredObject, snapshot: Snapshot, observed: Observed) -> Description:
    name, spec = stored.name, parse_document(stored.manifest).spec
    if isinstance(spec, ModelSpec) and not spec.is_managed:
        return _server(stored, spec, snapshot, observed)
    groups = [
        {"pool": pool.pool, **_plain(group)} for pool in observed.pools.values() for group in pool.groups if group.model == name
    ]
    routes = [status.name for status in route_statuses(snapshot, observed) if name in dict(status.targets)]
    reasons = [
        f"group {group['group']} in pool `{group['pool']}` is {group['state']}: {group['reason']}"
        for group in groups
        if group["reason"]
    ]
    controller = observed.controller
    if controller is None:
        reasons.append("no controller is at work, so nothing is placed; see application `controller` in the Ray dashboard")
    elif name in controller.unplaced:
        reasons += controller.unplaced[name]
    elif not groups and spec.replicas:
        reasons.append("its pool has been told to load it and has not begun")
    old = {group["generation"] for group in groups} - {stored.generation}
    if old:
        reasons.append(
            f"generation {stored.generation} is wanted, groups of generation {', '.join(map(str, sorted(old)))} are still there"
        )
    return {"groups": groups, "routes": routes}, reasons


def _server(stored: DesiredObject, spec: ModelSpec, snapshot: Snapshot, observed: Observed) -> Description:
    """One that runs elsewhere: how each gateway finds it."""
    found = {
        gateway.gateway: {name: value for name, value in _plain(group).items() if name in _OF_SERVERS}
        for gateway in observed.gateways.values()
        for group in gateway.servers
        if group.model == stored.name
    }
    routes = [status.name for status in route_statuses(snapshot, observed) if stored.name in dict(status.targets)]
    reasons = [f"it is a server that runs elsewhere, so it is asked and not managed: {spec.source}"]
    reasons += [f"gateway {name} finds it {one['state']}: {one['reason']}" for name, one in found.items() if one["reason"]]
    if not found:
        reasons.append("no gateway asks it" if spec.replicas else "spec.replicas is 0, so no gateway asks it")
    return {"gateways": found, "routes": routes}, reasons


def _route(stored: DesiredObject, snapshot: Snapshot, observed: Observed) -> Description:
    spec = parse_document(stored.manifest).spec
    assert isinstance(spec, RouteSpec)
    readiness = Readiness(observed.pools.values(), observed.gateways.values())
    total = sum(target.weight for target in spec.targets)
    targets, reasons = [], []
    for target in spec.targets:
        ready = readiness.ready(target.model)
        share = target.weight / total
        targets.append({"model": target.model, "weight": target.weight, "share": share, "ready_groups": ready})
        if ObjectKey("Model", target.model) not in snapshot.objects:
            reasons.append(f"model `{target.model}` does not exist; apply it, or switch the route")
        elif not readiness.answers(target.model):
            reasons.append(f"model `{target.model}` serves nowhere: {readiness.story(target.model)}")
    previous = [target["model"] for target in stored.previous["spec"]["targets"]] if stored.previous else []
    return {"targets": targets, "aliases": list(spec.aliases), "rollback_to": previous}, reasons


def _pool(stored: DesiredObject, observed: Observed) -> Description:
    record = observed.pools.get(stored.name)
    spec = parse_document(stored.manifest).spec
    assert isinstance(spec, PoolSpec)
    if record is None:
        message = observed.controller.message if observed.controller else "no controller is at work"
        why = message or "it starts, or starts again; if that takes long, see `ray status` and the Ray dashboard"
        return {}, [f"no heartbeat of its driver: {why}"]
    away = ranks_away(record) or record.message
    reasons = [away] if away else []
    reasons += [f"rank {rank.index} on node {rank.node} takes nothing: {rank.trouble}" for rank in record.ranks if rank.trouble]
    reasons += [f"rank {rank} is cordoned" for rank in sorted(spec.cordoned)]
    return _plain(record), reasons


def _plain(value: msgspec.Struct) -> dict[str, Any]:
    plain: Mapping[str, Any] = msgspec.to_builtins(value)
    return dict(plain)
