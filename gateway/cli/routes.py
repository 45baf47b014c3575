"""route switch, route rollback."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli import printing
from gateway.cli.options import ForceOption, Output, OutputOption, ServerOption, connect

if TYPE_CHECKING:
    from gateway.api.proto import admin_pb2 as admin

RouteArgument = Annotated[str, typer.Argument(metavar="ROUTE")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Point a route at another model, and back.", no_args_is_help=True, rich_markup_mode=None)
    group.command()(switch)
    group.command()(rollback)
    app.add_typer(group, name="route")


def switch(
    route: RouteArgument,
    to: Annotated[str, typer.Option("--to", metavar="MODEL", help="The model that answers from now on.")],
    force: ForceOption = False,
    server: ServerOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Send a route's new requests to another model; running ones finish where they are."""
    with connect(server) as client:
        _show(client.switch_route(route, to, force=force), f"now goes to {to}", output)


def rollback(
    route: RouteArgument, force: ForceOption = False, server: ServerOption = None, output: OutputOption = Output.table
) -> None:
    """Undo the last switch of a route."""
    with connect(server) as client:
        answer = client.rollback_route(route, force=force)
        targets = ", ".join(_targets(client.get("Route", route)))
        _show(answer, f"is back at {targets or 'what it had'}", output)


def _show(answer: admin.SwitchRouteResponse, what: str, output: Output) -> None:
    change = answer.change
    if output is Output.table:
        typer.echo(f"Route {change.name} {what} (generation {change.generation}, {printing.clock(answer.committed_unix)})")
        return
    content = {
        "name": change.name,
        "action": change.action,
        "generation": change.generation,
        "diff": change.diff,
        "committed_unix": answer.committed_unix,
    }
    printing.document(content, output)


def _targets(answer: admin.GetResponse) -> list[str]:
    """`model`, or `model 90 %` where there are several."""
    targets = [target for item in answer.objects for target in json.loads(item.manifest_json)["spec"]["targets"]]
    total = sum(target.get("weight", 100) for target in targets)
    if len(targets) == 1:
        return [targets[0]["model"]]
    return [f"{target['model']} {100 * target.get('weight', 100) / total:.0f} %" for target in targets if total]
