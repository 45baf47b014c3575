"""apply, plan, get, describe, delete, schema: the desired objects of a site."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.api.errors import YardError, invalid, not_found
from gateway.cli import plans, printing
from gateway.cli.options import KINDS, ForceOption, Output, OutputOption, ServerOption, connect, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.api.proto import admin_pb2 as admin

FilesOption = Annotated[
    list[str],
    typer.Option("--file", "-f", metavar="FILE|DIR", help="YAML file or directory; `-` is standard input. May be repeated."),
]
KindArgument = Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(kind.lower() for kind in KINDS)}.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME")]


def register(app: typer.Typer) -> None:
    for command in (apply, plan, get, describe, delete, schema):
        app.command()(command)


def apply(
    file: FilesOption, force: ForceOption = False, server: ServerOption = None, output: OutputOption = Output.table
) -> None:
    """Create or change objects. Either all of them are valid and written, or none is."""
    objects = _read(file)
    with connect(server) as client:
        answer = client.apply(objects, force=force)
    if output is Output.table:
        for change in answer.changes:
            typer.echo(f"{change.kind} {change.name} {change.action} (generation {change.generation})")
            for note in change.notes:
                typer.echo(f"  {note}")
    else:
        printing.document({"revision": answer.revision, "changes": _changes(answer.changes)}, output)


def plan(file: FilesOption, force: ForceOption = False, server: ServerOption = None, output: OutputOption = Output.table) -> None:
    """Show what `apply` would do: changes, loads, moves and evictions, how long they take, and SLOs at risk. Writes nothing.

    Exit codes: 0 nothing would change, 2 something would, 1 it cannot be done (a model would be nowhere, `apply` would
    refuse it without --force, or a file is wrong).
    """
    try:
        objects = _read(file)
        with connect(server) as client:
            answer = client.plan(objects, force=force)
    except YardError as error:
        typer.echo(f"yard: {error.message}", err=True)
        raise typer.Exit(plans.IMPOSSIBLE) from error
    if output is Output.table:
        plans.show(answer)
    else:
        printing.document({"changes": _changes(answer.changes), "placements": plans.plain(answer.placements)}, output)
    raise typer.Exit(plans.exit_code(answer))


def get(
    kind: Annotated[str | None, typer.Argument(metavar="[KIND]", show_default=False)] = None,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False)] = None,
    server: ServerOption = None,
    output: OutputOption = Output.table,
) -> None:
    """List desired objects. `-o yaml` prints them as `apply` reads them."""
    wanted = "" if kind in (None, "all") else kind_of(kind)
    with connect(server) as client:
        objects = list(client.get(wanted, name or "").objects)
    if name and not objects:
        raise not_found(f"{wanted} {name!r} does not exist; `yard get {wanted.lower()}` lists those that do")
    manifests = [json.loads(item.manifest_json) for item in objects]
    if output is not Output.table:
        printing.document(manifests[0] if name else manifests, output)
        return
    rows = [(item.kind, item.name, item.generation, _facts(manifest)) for item, manifest in zip(objects, manifests, strict=True)]
    printing.table(("KIND", "NAME", "GENERATION", "SPEC"), rows, nothing="no objects; `yard apply -f FILE` makes some")


def describe(kind: KindArgument, name: NameArgument, server: ServerOption = None, output: OutputOption = Output.table) -> None:
    """Show an object, what is observed of it, and why it is where it is."""
    with connect(server) as client:
        answer = client.describe(kind_of(kind), name)
    observed = json.loads(answer.observed_json) if answer.observed_json else {}
    desired = json.loads(answer.object.manifest_json)
    if output is Output.json:
        content = {
            "desired": desired,
            "generation": answer.object.generation,
            "observed": observed,
            "reasons": list(answer.reasons),
        }
        printing.document(content, output)
        return
    printing.document({"desired": desired, "generation": answer.object.generation, "observed": observed}, Output.yaml)
    typer.echo("reasons:" if answer.reasons else "reasons: []")
    for reason in answer.reasons:
        typer.echo(f"- {json.dumps(reason, ensure_ascii=False)}")


def delete(
    kind: KindArgument,
    name: NameArgument,
    force: ForceOption = False,
    server: ServerOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Delete an object. A model that a route still names needs --force."""
    with connect(server) as client:
        change = client.delete(kind_of(kind), name, force=force)
    if output is Output.table:
        typer.echo(f"{change.kind} {change.name} {change.action or 'deleted'}")
    else:
        printing.document(_changes([change])[0], output)


def schema(
    kind: Annotated[str | None, typer.Argument(metavar="[KIND]", show_default=False)] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Bring gateway/api/schema/*.json up to date instead of printing.")
    ] = False,
    output: OutputOption = Output.json,
) -> None:
    """Print the JSON schema of a kind, or of all."""
    from gateway.api import schema as schemas
    from gateway.api.config import SPECS

    if write:
        for file, content in schemas.files().items():
            (schemas.DIRECTORY / file).write_text(content)
            typer.echo(schemas.DIRECTORY / file)
        return
    names = {known.lower(): known for known in SPECS}
    if kind is not None and kind.lower() not in names:
        raise invalid(f"unknown kind {kind!r}; known are {', '.join(names)}")
    content = schemas.schema(names[kind.lower()]) if kind else {known: schemas.schema(known) for known in SPECS}
    printing.document(content, Output.json if output is Output.table else output)


def _read(files: list[str]) -> list[admin.Object]:
    from gateway.api import manifest
    from gateway.site.desired import to_object

    documents = manifest.read([Path(file) for file in files if file != "-"])
    if "-" in files:
        documents += manifest.read_text(sys.stdin.read(), "<standard input>")
    desired = [document for document in documents if document.manifest.kind in KINDS]
    if not desired:
        raise invalid(f"{', '.join(files)}: no object to apply (the Site document is read by `yard up` only)")
    return [to_object(document) for document in desired]


def _changes(changes: Iterable[admin.Change]) -> list[dict[str, Any]]:
    return [
        {
            "kind": item.kind,
            "name": item.name,
            "action": item.action,
            "generation": item.generation,
            "diff": item.diff,
            "notes": list(item.notes),
        }
        for item in changes
    ]


def _facts(manifest: dict[str, Any]) -> str:
    """What a list line says of an object."""
    spec = manifest.get("spec") or {}
    if manifest["kind"] == "Route":
        targets = ", ".join(f"{target['model']}:{target.get('weight', 100)}" for target in spec.get("targets", ()))
        aliases = ", ".join(spec.get("aliases", ()))
        return f"to {targets}" + (f" (also {aliases})" if aliases else "")
    return ", ".join(f"{key}={value}" for key, value in spec.items() if isinstance(value, str | int | float))
