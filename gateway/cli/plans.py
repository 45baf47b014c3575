"""What `yard plan` shows of an answer, and the exit code that it comes to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

from gateway.cli import printing

if TYPE_CHECKING:
    from gateway.api.proto import admin_pb2 as admin

NOTHING, IMPOSSIBLE, CHANGES = 0, 1, 2


def exit_code(answer: admin.PlanResponse) -> int:
    if any(item.action == "none" for item in answer.placements):
        return IMPOSSIBLE
    changed = any(item.action != "unchanged" for item in answer.changes)
    return CHANGES if changed or any(item.action not in ("keep", "external") for item in answer.placements) else NOTHING


def plain(placements: Iterable[admin.Placement]) -> list[dict[str, Any]]:
    return [
        {
            "model": item.model,
            "action": item.action,
            "pool": item.pool,
            "ranks": list(item.ranks),
            "path": item.path,
            "bytes": item.bytes,
            "seconds": round(item.seconds, 3),
            "standby": item.standby,
            "evicts": list(item.evicts),
            "risks": list(item.risks),
            "reasons": list(item.reasons),
        }
        for item in placements
    ]


def show(answer: admin.PlanResponse) -> None:
    for change in answer.changes:
        typer.echo(f"{change.kind} {change.name}: {change.action}")
        if change.diff:
            typer.echo(change.diff.rstrip("\n"))
        for note in change.notes:
            typer.echo(f"  {note}")
    typer.echo()
    rows = [_row(item) for item in answer.placements]
    printing.table(
        ("MODEL", "ACTION", "POOL", "RANKS", "BY", "BYTES", "SECONDS", "REASONS"), rows, nothing="no model changes its place"
    )
    risks = list(dict.fromkeys(risk for item in answer.placements for risk in item.risks))
    if risks:
        typer.echo("\nSLOs at risk:")
        for risk in risks:
            typer.echo(f"- {risk}")
    moved = sum(item.bytes for item in answer.placements)
    if moved:
        slowest = max(item.seconds for item in answer.placements)
        typer.echo(f"\n{printing.size(moved)} to bring, about {slowest:.1f} s for the slowest once the ranks of its pool run")


def _row(item: admin.Placement) -> tuple[object, ...]:
    reasons = list(item.reasons)
    if item.standby:
        reasons.insert(0, f"takes turns with {', '.join(item.evicts)}" if item.evicts else "takes turns")
    return (
        item.model,
        item.action,
        item.pool or ("elsewhere" if item.action == "external" else "nowhere"),
        ",".join(map(str, item.ranks)) or "-",
        item.path or "-",
        printing.size(item.bytes) if item.bytes else "-",
        f"{item.seconds:.1f}" if item.path else "-",
        "; ".join(reasons),
    )
