"""The state of a whole site in one line. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.api.records import SiteStatus
from gateway.api.server_source import names_server
from gateway.state.ranks_away import ranks_away
from gateway.state.servers import server_groups


@dataclass(frozen=True, slots=True)
class Summary:
    line: str
    problems: tuple[str, ...]

    @property
    def is_ready(self) -> bool:
        return not self.problems


def summarize(status: SiteStatus, also: Sequence[str] = (), notes: Sequence[str] = ()) -> Summary:
    """Problems: those that are known already (`also`), models with fewer ready groups than desired, routes that cannot answer,
    lost ranks, Redis or controller gone. `notes` are said, too, and are no problems."""
    problems = list(also)
    if status.redis != "ok":
        problems.append("Redis is not reachable, serving from the last snapshot")
    if status.controller is None:
        problems.append("no controller")
    servers = server_groups(status.gateways)
    groups = [group for pool in status.pools for group in pool.groups]
    for model in status.models:
        spec = model.manifest.get("spec", {})
        if names_server(str(spec.get("source", ""))):
            server = servers.get(model.name)
            if spec.get("replicas", 1) and (server is None or server.state != "ready"):
                why = server.reason if server else "no gateway has looked at it yet"
                problems.append(f"model {model.name} does not answer: {why}")
            continue
        wanted = spec.get("replicas", 1)
        if scaling := spec.get("scaling"):
            wanted = min(wanted, scaling.get("min_replicas", 1))
        ready = [group for group in groups if group.model == model.name and group.state in ("ready", "parked")]
        if len(ready) < wanted:
            reasons = [group.reason for group in groups if group.model == model.name and group.reason and group not in ready]
            reasons += status.controller.unplaced.get(model.name, ()) if status.controller else ()
            why = f": {reasons[0]}" if reasons else ""
            problems.append(f"model {model.name} has {len(ready)} of {wanted} groups ready{why}")
        elif sum(group.generation >= model.generation for group in ready) < wanted:
            problems.append(f"model {model.name} still serves an older generation than {model.generation}")
    problems += [f"route {route.name} cannot answer" for route in status.routes if not route.ready]
    problems += [f"pool {name}: no heartbeat of its driver, which is being started" for name in status.awaited]
    problems += [f"pool {pool.pool}: {away}" for pool in status.pools if (away := ranks_away(pool))]
    counts = (
        f"{len(status.models)} models, {len(status.routes)} routes, {len(status.pools)} pools, {len(status.gateways)} gateways"
    )
    head = f"site {status.site} revision {status.revision}: {'ready' if not problems else 'not ready'} ({counts})"
    return Summary("; ".join([head, *problems, *notes]), tuple(problems))
