"""What `yard simulate` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from gateway.api.words import counted
from gateway.cli import printing
from gateway.cli.options import Output

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from placement.capacity import Capacity
    from placement.outcome import Outcome


def show_capacity(tried: Sequence[Capacity], target: float, output: Output) -> None:
    """Exits with 1 when nothing that was tried is enough."""
    rows = [
        {
            "devices": each.devices,
            "within_slo": round(each.outcome.within_slo, 4) if each.outcome else None,
            "busy": round(each.outcome.busy_share, 3) if each.outcome else None,
            "switches": each.outcome.switches if each.outcome else None,
            "replicas": {name: count for name, count in each.replicas.items() if count != 1},
        }
        for each in tried
    ]
    enough = tried[-1].reaches(target)
    if output is not Output.table:
        printing.document({"devices": tried[-1].devices if enough else None, "target": target, "tried": rows}, output)
    else:
        lines = [
            (row["devices"], _percent(row["within_slo"]), _percent(row["busy"]), _or_dash(row["switches"]), row["replicas"] or "")
            for row in rows
        ]
        printing.table(("DEVICES", "WITHIN SLO", "BUSY", "WAKES", "REPLICAS OTHER THAN 1"), lines)
        if enough:
            are = f"{counted(tried[-1].devices, 'device')} {'is' if tried[-1].devices == 1 else 'are'}"
            typer.echo(f"\n{are} the fewest with {target:.1%} of the requests within their SLO")
        else:
            typer.echo(
                f"\nnot even {tried[-1].devices} devices do: a single request takes longer than its SLO, or a model fits nowhere"
            )
    if not enough:
        raise typer.Exit(1)


def show(outcome: Outcome, spent_s: float, refusals: dict[str, str], missing: Mapping[str, int], output: Output) -> None:
    """`missing`: requests that were left out, by the model that the site does not have."""
    if output is not Output.table:
        content = {
            "requests": outcome.requests,
            "within_slo": outcome.within_slo,
            "switches": outcome.switches,
            "busy": outcome.busy_share,
            "seconds": outcome.seconds,
            "unknown_models": outcome.unknown,
            "left_out": dict(missing),
            "cpu_s": round(spent_s, 3),
            "models": [{name: getattr(row, name) for name in row.__dataclass_fields__} for row in outcome.models],
            "nowhere": refusals,
        }
        printing.document(content, output)
        return
    rows = [
        (
            row.model, row.requests, _percent(row.within_slo if row.requests else None), f"{row.first_token_p50_s * 1e3:.0f} ms",
            f"{row.first_token_p99_s * 1e3:.0f} ms", f"{row.token_p50_s * 1e3:.1f} ms", row.refused, row.output_tokens,
        )
        for row in outcome.models
    ]  # fmt: skip
    printing.table(
        ("MODEL", "REQUESTS", "WITHIN SLO", "FIRST TOKEN", "99 %", "A TOKEN", "REFUSED", "TOKENS"), rows, nothing="no models"
    )
    typer.echo(
        f"\n{counted(outcome.requests, 'request')} over {outcome.seconds:.0f} s, {outcome.within_slo:.1%} within their SLO; "
        f"{counted(outcome.switches, 'wake')}; devices busy {outcome.busy_share:.0%}; simulated in {spent_s:.2f} s"
    )
    if missing:
        typer.echo(left_out(missing))
    for name, reason in refusals.items():
        typer.echo(f"{name} is nowhere: {reason}")


def left_out(missing: Mapping[str, int]) -> str:
    total = sum(missing.values())
    verb, were = ("is", "was") if total == 1 else ("are", "were")
    names = ", ".join(sorted(missing))
    return f"{counted(total, 'request')} {verb} for models that the site does not have, and {were} left out: {names}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _or_dash(value: object) -> object:
    return "-" if value is None else value
