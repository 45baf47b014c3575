"""ps, events: what the site is doing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli import printing
from gateway.cli.options import Output, OutputOption, ServerOption, connect

if TYPE_CHECKING:
    from gateway.api.proto import admin_pb2 as admin
    from gateway.api.records import GroupRecord, PoolRecord, SiteStatus


def register(app: typer.Typer) -> None:
    app.command()(ps)
    app.command()(events)


def ps(server: ServerOption = None, output: OutputOption = Output.table) -> None:
    """Pools and their memory, worker groups, routes and gateways, as they are this second."""
    with connect(server) as client:
        status = client.status()
    if output is not Output.table:
        import msgspec

        printing.document(msgspec.to_builtins(status), output)
        return
    _print_status(status)


def _print_status(status: SiteStatus) -> None:
    redis = "" if status.redis == "ok" else " · Redis not reachable, serving from the last snapshot"
    from gateway.state.servers import server_groups

    typer.echo(f"site {status.site} · revision {status.revision}{redis}\n")
    ranks = [row for pool in status.pools for row in _rank_rows(pool)]
    silent = "no heartbeat of its driver, which is being started"
    ranks += [(name, "-", "-", "-", "-", "-", "-", silent) for name in status.awaited]
    printing.table(("POOL", "RANK", "NODE", "PID", "DEVICE", "MEMORY USED", "CAPACITY", "STATE"), ranks, nothing="no pool")
    typer.echo()
    groups = [row for pool in status.pools for row in _group_rows(pool)]
    header = ("MODEL", "POOL", "RANKS", "TP×PP", "PRECISION", "STATE", "RUNNING", "WAITING", "NOTE")
    groups += [
        (group.model, "elsewhere", "-", "-", "-", group.state, group.running, "-", group.reason)
        for _, group in sorted(server_groups(status.gateways).items())
    ]
    placed = {row[0] for row in groups}
    unplaced = status.controller.unplaced if status.controller else {}
    for model in status.models:
        if model.name not in placed:
            reasons = unplaced.get(model.name, ())
            note = "; ".join(reasons) or "; ".join(f"pool {name} is starting" for name in status.awaited)
            groups.append((model.name, "-", "-", "-", "-", "unplaced" if reasons else "waiting", 0, 0, note))
    printing.table(header, groups, nothing="no model")
    switches = [row for pool in status.pools for row in _switch_rows(pool)]
    if switches:
        typer.echo()
        printing.table(("POOL", "SWITCH", "COUNT", "LAST", "MEDIAN", "LONGEST"), switches, nothing="")
    typer.echo()
    routes = [
        (
            route.name,
            ", ".join(f"{model}:{weight}" for model, weight in route.targets),
            ", ".join(route.aliases) or "-",
            _yes(route.ready),
        )
        for route in status.routes
    ]
    printing.table(("ROUTE", "TARGETS", "ALIASES", "READY"), routes, nothing="no route")
    typer.echo()
    gateways = [
        (item.gateway[:12], item.node, item.pid, item.grpc_endpoint, item.http_endpoint, item.revision, item.requests_in_flight)
        for item in status.gateways
    ]
    printing.table(("GATEWAY", "NODE", "PID", "GRPC", "HTTP", "REVISION", "IN FLIGHT"), gateways, nothing="no gateway")
    if status.controller is None:
        typer.echo("\nno controller holds the lease: desired state is not being acted on")
    elif status.controller.message:
        typer.echo(f"\ncontroller: {status.controller.message}")


def _rank_rows(pool: PoolRecord) -> list[tuple[object, ...]]:
    if not pool.ranks:
        return [(pool.pool, "-", pool.node, "-", pool.device, "-", "-", pool.message or "starting")]
    rows: list[tuple[object, ...]] = []
    for rank in pool.ranks:
        used = printing.size(sum(count for _, _, count in rank.ledger))
        size, node, pid = printing.size(rank.capacity_bytes), rank.node or "-", rank.pid or "-"
        rows.append((pool.pool, rank.index, node, pid, rank.device, used, size, rank.word))
    return rows


def _group_rows(pool: PoolRecord) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for group in pool.groups:
        state = f"{group.state} {group.progress:.0%}" if group.state == "loading" else group.residency or group.state
        shape = f"{group.tensor_parallel}×{group.pipeline_parallel}"
        ranks = ",".join(map(str, group.ranks))
        rows.append((group.model, pool.pool, ranks, shape, group.precision, state, group.running, group.waiting, _note(group)))
    return rows


def _switch_rows(pool: PoolRecord) -> list[tuple[object, ...]]:
    """What bringing models in and out took, by path."""
    return [
        (
            pool.pool,
            switch.path,
            switch.count,
            *(f"{seconds * 1000:.0f} ms" for seconds in (switch.last_s, switch.median_s, switch.longest_s)),
        )
        for switch in pool.switches
    ]


def _note(group: GroupRecord) -> str:
    standby = f"{printing.size(group.standby_bytes)} standing by" if group.standby_bytes else ""
    return "; ".join(part for part in (standby, group.reason) if part)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def events(
    follow: Annotated[bool, typer.Option("--follow", "-F", help="Keep printing what happens.")] = False,
    last: Annotated[int, typer.Option("--last", min=1, help="Start with this many past events.")] = 50,
    server: ServerOption = None,
    output: OutputOption = Output.table,
) -> None:
    """What happened: changes of desired state, models that came and went, lost ranks."""
    with connect(server) as client:
        for event in client.events(follow=follow, last=last):
            _print_event(event, output)


def _print_event(event: admin.Event, output: Output) -> None:
    if output is Output.table:
        actor = f" (by {event.actor})" if event.actor else ""
        typer.echo(f"{printing.clock(event.time_unix)}  {event.kind:<18}  {event.subject:<24}  {event.message}{actor}")
        return
    content: dict[str, Any] = {
        "id": event.id,
        "time_unix": event.time_unix,
        "kind": event.kind,
        "subject": event.subject,
        "message": event.message,
        "actor": event.actor,
        "detail": _detail(event.detail_json),
    }
    if output is Output.json:
        typer.echo(json.dumps(content, ensure_ascii=False))  # one a line, so that a follower can read them as they come
    else:
        printing.document([content], output)


def _detail(text: str) -> Any:
    """Writers of all versions of the house put events into one stream; what is no JSON is shown as it is."""
    if not text:
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
