"""Prints what commands found: aligned columns for people, JSON and YAML for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import typer

from gateway.cli.options import Output


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, nothing: str = "nothing found") -> None:
    """Left-aligned columns two spaces apart; the last is not padded. Without rows: `nothing`."""
    if not rows:
        typer.echo(nothing)
        return
    lines = [[str(cell) for cell in line] for line in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def document(data: Any, output: Output) -> None:
    """One value; for YAML, a list becomes one document each, as `yard apply -f -` reads them."""
    if output is Output.json:
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
        return
    import yaml

    if isinstance(data, list):
        typer.echo(yaml.safe_dump_all(data, sort_keys=False, allow_unicode=True, explicit_start=True), nl=False)
    else:
        typer.echo(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), nl=False)


def size(count: float) -> str:
    """Bytes with a binary unit: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("the loop returns at its last unit")


def clock(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).astimezone().isoformat(sep=" ", timespec="milliseconds")
