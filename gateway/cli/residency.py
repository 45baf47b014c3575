"""park, wake: what is in memory this second. Placement and desired state stay as they are."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli import printing
from gateway.cli.options import Output, OutputOption, ServerOption, connect

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL")]


def register(app: typer.Typer) -> None:
    app.command()(park)
    app.command()(wake)


def park(
    model: ModelArgument,
    cold: Annotated[bool, typer.Option("--cold", help="Keep no copy in host memory either.")] = False,
    server: ServerOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Take a model out of its pools' memory once its running requests have ended. The next request brings it back."""
    _set(model, "cold" if cold else "parked", server, output)


def wake(model: ModelArgument, server: ServerOption = None, output: OutputOption = Output.table) -> None:
    """Bring a parked model back into memory before somebody asks for it."""
    _set(model, "resident", server, output)


def _set(model: str, residency: str, server: str | None, output: Output) -> None:
    with connect(server) as client:
        states = client.set_residency(model, residency)
    if output is not Output.table:
        printing.document({"model": model, "pools": states}, output)
        return
    for pool, state in sorted(states.items()):
        typer.echo(f"Model {model} in pool {pool} is {state}")
