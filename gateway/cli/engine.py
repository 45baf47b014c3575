"""check, and the other commands on engines: whether a model answers as its reference does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.api.errors import ErrorCode, YardError
from gateway.cli import engine_artifacts, printing
from gateway.cli.options import Output, OutputOption, ServerOption, connect

if TYPE_CHECKING:
    from gateway.check.accuracy import Report


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Engines, and models that were built or quantized.", no_args_is_help=True, rich_markup_mode=None)
    for command in (check, engine_artifacts.quantize, engine_artifacts.build):
        group.command()(command)
    app.add_typer(group, name="engine")
    app.command()(check)


def check(
    candidate: Annotated[str, typer.Argument(metavar="MODEL", help="The served model that is to be promoted.")],
    reference: Annotated[str, typer.Option("--reference", metavar="MODEL", help="The served model that it is to agree with.")],
    texts: Annotated[Path | None, typer.Option("--texts", help="Plain text, paragraphs apart by empty lines.")] = None,
    tasks: Annotated[Path | None, typer.Option("--tasks", help="Lines of JSON: prompt, answer.")] = None,
    places: Annotated[int, typer.Option("--places", min=1, help="Positions of the texts to compare at.")] = 400,
    top1: Annotated[float, typer.Option("--top1", min=0, max=1, help="Least agreement on the likeliest token.")] = 0.9,
    kl: Annotated[float, typer.Option("--kl", min=0, help="Most KL divergence, in nats a token.")] = 0.05,
    perplexity: Annotated[float, typer.Option("--perplexity", min=0, help="Most relative increase.")] = 0.05,
    lost_tasks: Annotated[float, typer.Option("--lost-tasks", min=0, max=1, help="Most tasks lost, as a share.")] = 0.02,
    promote: Annotated[str | None, typer.Option("--promote", metavar="ROUTE", help="Then switch this route to it.")] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Also write the report there, as JSON.")] = None,
    server: ServerOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Compare two served models; exit code 5, and no promotion, when they are further apart than allowed."""
    import gateway.check
    from gateway.check.accuracy import Limits
    from gateway.check.measure import compare, read_set

    own = Path(gateway.check.__file__).parent
    chosen = read_set(texts or own / "texts.txt", tasks or own / "tasks.jsonl")
    limits = Limits(top1, kl, perplexity, lost_tasks)
    with connect(server) as client:
        with typer.progressbar(length=1000, label="Comparing", hidden=output is not Output.table) as bar:

            def progress(done: int, of: int) -> None:
                bar.update(1000 * done // of - bar.pos)

            found = compare(client, reference, candidate, chosen, limits, places=places, progress=progress)
        content = {"reference": reference, "candidate": candidate, "passed": found.passed, **dataclasses.asdict(found)}
        if report is not None:
            report.write_text(json.dumps(content, indent=1) + "\n")
        if output is Output.table:
            _show(candidate, reference, found)
        else:
            printing.document(content, output)
        if not found.passed:
            raise YardError(ErrorCode.CONFLICT, f"model {candidate} is not promoted: {'; '.join(found.failures)}")
        if promote is not None:
            client.switch_route(promote, candidate)
            typer.echo(f"Route {promote} now goes to {candidate}")


def _show(candidate: str, reference: str, found: Report) -> None:
    rows = [
        ("positions compared", str(found.places), ""),
        ("top-1 agreement", f"{found.top1_agreement:.1%}", ""),
        ("KL divergence, nats a token", f"{found.kl_mean:.5f}", f"99 % below {found.kl_p99:.4f}"),
        ("perplexity", f"{found.perplexity_candidate:.2f}", f"reference {found.perplexity_reference:.2f}"),
        ("tasks answered", f"{found.tasks_candidate:.0%} of {found.tasks}", f"reference {found.tasks_reference:.0%}"),
    ]
    typer.echo(f"{candidate} against {reference}: {'passed' if found.passed else 'not passed'}")
    for name, value, beside in rows:
        typer.echo(f"  {name:<28} {value:<12} {beside}".rstrip())
