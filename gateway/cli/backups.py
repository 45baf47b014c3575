"""backup, restore: the desired state of a site as a file, and back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.api.errors import invalid
from gateway.cli.options import ServerOption, connect


def register(app: typer.Typer) -> None:
    for command in (backup, restore):
        app.command()(command)


def backup(
    file: Annotated[str, typer.Argument(metavar="FILE", help="`-` is standard output.")] = "-", server: ServerOption = None
) -> None:
    """Write all that is desired (models, routes, pools, tenants) into a file."""
    with connect(server) as client:
        answer = client.backup()
    if file == "-":
        typer.echo(answer.snapshot_json)
        return
    try:
        Path(file).write_text(answer.snapshot_json, encoding="utf-8")
    except OSError as error:
        raise invalid(f"{file} cannot be written: {error.strerror}") from error
    typer.echo(f"{answer.objects} objects of revision {answer.revision} in {file}")


def restore(
    file: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="Of `yard backup`; `-` is standard input. Default: what the gateway holds."),
    ] = None,
    discard: Annotated[
        bool, typer.Option("--discard", help="Give up what the gateways hold, and take the store as it is.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also what was deleted since FILE was made, as new generations, and names that lead nowhere."
        ),
    ] = False,
    server: ServerOption = None,
) -> None:
    """Give back to the store what it lost. What it has in a newer generation stays."""
    if force and file is None:
        raise invalid("--force needs a file of `yard backup`: what the gateways hold has no older state")
    if discard and file is not None:
        raise invalid("--discard takes no file: it keeps what the store has")
    text = ""
    if file is not None:
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise invalid(f"{file} cannot be read: {error.strerror}") from error
        if not text.strip():
            raise invalid(f"{file} is empty; give a file of `yard backup`")
    with connect(server) as client:
        answer = client.restore(text, discard=discard, force=force)
    what = "the store is taken as it is" if discard else f"{answer.written} objects restored"
    typer.echo(f"{what} (revision {answer.revision})")
    if answer.skipped:
        typer.echo(f"{len(answer.skipped)} skipped: deleted since: {', '.join(answer.skipped)}; --force brings them back")
