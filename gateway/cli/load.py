"""bench, stress: load on a gateway, ours or another's, and what it answered."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.options import Output, OutputOption

if TYPE_CHECKING:
    from gateway.load.drive import Plan
    from gateway.load.report import Outcome, Slo

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A route or a model.")]
TargetOption = Annotated[
    str | None,
    typer.Option("--target", help="HOST:PORT or grpc://… for gRPC, http://… for OpenAI's HTTP. Default: this machine's site."),
]
InputOption = Annotated[int, typer.Option("--input-tokens", min=1, help="Of each prompt.")]
OutputTokensOption = Annotated[int, typer.Option("--output-tokens", min=1, help="Of each answer.")]
ConcurrencyOption = Annotated[int, typer.Option("--concurrency", min=1, help="Requests that are open at any time.")]
FirstOption = Annotated[float | None, typer.Option("--slo-first-ms", help="A good answer's first token comes within this.")]
TokenOption = Annotated[float | None, typer.Option("--slo-token-ms", help="A good answer's tokens are so far apart, on average.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="A picture of the run.")]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="The result as a file.")]


def register(app: typer.Typer) -> None:
    app.command()(bench)
    app.command()(stress)


def bench(
    model: ModelArgument,
    input_tokens: InputOption = 512,
    output_tokens: OutputTokensOption = 128,
    concurrency: ConcurrencyOption = 16,
    requests: Annotated[int | None, typer.Option("--requests", min=1, help="Default: eight for each at once.")] = None,
    target: TargetOption = None,
    slo_first_ms: FirstOption = None,
    slo_token_ms: TokenOption = None,
    plot: PlotOption = None,
    json_file: JsonOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Measure a model: requests of one size, so many at once; percentiles, tokens a second, goodput."""
    from gateway.load.drive import Plan
    from gateway.load.report import Slo

    plan = Plan(model, input_tokens, output_tokens, concurrency, requests=requests or 8 * concurrency)
    _run(plan, target, Slo(slo_first_ms, slo_token_ms), plot, json_file, output)


def stress(
    model: ModelArgument,
    concurrency: ConcurrencyOption = 16,
    duration: Annotated[float, typer.Option("--duration", min=1, help="Seconds.")] = 300.0,
    input_tokens: InputOption = 256,
    output_tokens: OutputTokensOption = 64,
    cancel_one_in: Annotated[
        int, typer.Option("--cancel-one-in", min=0, help="Leave one request in so many half-way; 0: none.")
    ] = 20,
    target: TargetOption = None,
    slo_first_ms: FirstOption = None,
    slo_token_ms: TokenOption = None,
    plot: PlotOption = None,
    json_file: JsonOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Keep a model busy with requests of all sizes, some of which their clients leave. Fails when one is answered wrongly."""
    from gateway.load.drive import Plan
    from gateway.load.report import Slo

    plan = Plan(model, input_tokens, output_tokens, concurrency, duration_s=duration, varied=True, cancel_one_in=cancel_one_in)
    errors = _run(plan, target, Slo(slo_first_ms, slo_token_ms), plot, json_file, output)
    if set(errors) - {"exhausted", "429"}:  # a full queue is an answer, too
        raise typer.Exit(1)


def _run(plan: Plan, target: str | None, slo: Slo, plot: Path | None, json_file: Path | None, output: Output) -> dict[str, int]:
    from gateway.cli import pictures, printing
    from gateway.load.report import lines, report

    pictures.check("--plot", plot)
    outcomes, elapsed_s = asyncio.run(_drive(plan, target))
    summary = {
        "model": plan.model,
        "input_tokens": plan.input_tokens,
        "output_tokens": plan.output_tokens,
        "concurrency": plan.concurrency,
        **report(outcomes, elapsed_s, slo),
    }
    if output is not Output.table:
        printing.document(summary, output)
    else:
        for line in lines(summary):
            typer.echo(line)
    if json_file is not None:
        json_file.write_text(json.dumps(summary, indent=1) + "\n")
    if plot is not None:
        from gateway.load.plot import plot as draw

        title = f"{plan.model}: {plan.input_tokens} in, {plan.output_tokens} out, {plan.concurrency} at once"
        draw(outcomes, elapsed_s, title, plot)
    return summary["errors"]


async def _drive(plan: Plan, target: str | None) -> tuple[list[Outcome], float]:
    from gateway.cli import load_progress
    from gateway.cli.api_key import api_key
    from gateway.cli.options import DEFAULT_SERVER
    from gateway.load.drive import run
    from gateway.load.targets import check, target_of
    from gateway.site import state
    from gateway.site.client_tls import of_environment
    from gateway.site.home import Home

    local = state.load(Home.from_environment()) if target is None else None
    tls = local.tls if local else of_environment()
    url = target or (local.grpc_address if local else DEFAULT_SERVER)
    there = target_of(url, tls, api_key())
    try:
        await check(there, plan.model)
        async with load_progress.shown(plan) as progress:
            return await run(plan, there, progress)
    finally:
        await there.close()
