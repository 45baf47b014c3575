"""doctor, completion: whether this machine has what a site needs, and help for the shell."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.options import Output, OutputOption

COMPLETE_VARIABLE = "_YARD_COMPLETE"
"""Set by the script that `completion` prints, when the shell asks what could come next."""
_SIGNS = {"good": "ok  ", "warning": "warn", "bad": "BAD "}


class Shell(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def register(app: typer.Typer) -> None:
    app.command()(doctor)
    app.command()(completion)


def doctor(
    site: Annotated[
        Path | None, typer.Option("--site", help="Site directory. Default: configs/local.", show_default=False)
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Look at versions, drivers, NCCL, MPI, ports, Redis, clock and disk, and say what to do. Fails when something is bad."""
    import msgspec

    from gateway.cli import printing
    from gateway.site.doctor import examine
    from gateway.site.home import Home
    from gateway.site.last_listen import as_last_time
    from gateway.site.site_files import DEFAULT_SITE, read_site

    home, found = Home.from_environment(), []
    for finding in examine(home, as_last_time(home, read_site(site or DEFAULT_SITE, {}, None))[0]):
        found.append(finding)
        if output is Output.table:
            typer.echo(f"{_SIGNS[finding.verdict]}  {finding.what:<9} {finding.text}")
            if finding.advice:
                typer.echo(f"{'':<16}→ {finding.advice}")
    if output is not Output.table:
        printing.document(msgspec.to_builtins(found), output)
    if any(finding.verdict == "bad" for finding in found):
        raise typer.Exit(1)


def completion(shell: Annotated[Shell, typer.Argument()]) -> None:
    """Print what makes the shell complete `yard`: `source <(yard completion bash)`."""
    from typer.completion import get_completion_script  # pyright: ignore[reportPrivateImportUsage]

    typer.echo(get_completion_script(prog_name="yard", complete_var=COMPLETE_VARIABLE, shell=shell.value))
