"""simulate: a trace replayed against a site directory, without the site."""

from __future__ import annotations

import time
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.api.errors import invalid
from gateway.cli.options import Output, OutputOption
from gateway.cli.simulation_report import left_out, show, show_capacity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.cli.traces import Arrival
    from placement.outcome import Outcome
    from placement.simulation import Settings
    from placement.types import Snapshot


class Format(StrEnum):
    csv = "csv"
    azure = "azure"
    burstgpt = "burstgpt"
    servegen = "servegen"


def register(app: typer.Typer) -> None:
    app.command()(simulate)


def simulate(
    site: Annotated[list[str], typer.Option("--site", metavar="DIR", help="Site directory or file. May be repeated.")],
    trace: Annotated[Path | None, typer.Option(help="File of arrivals; for servegen a directory of clients.")] = None,
    format_: Annotated[
        Format, typer.Option("--format", help="csv: time_s,model,prompt_tokens,output_tokens with that header.")
    ] = Format.csv,
    model: Annotated[
        list[str] | None, typer.Option(help="Models that a trace without our names is for, in order. Default: the site's.")
    ] = None,
    generate: Annotated[
        float | None, typer.Option(metavar="RATE", help="Draw a trace with so many requests a second instead.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Of the drawn trace; of a ServeGen trace at most so many.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    zipf: Annotated[float, typer.Option(help="Popularity of the n-th model is 1 / n^ZIPF.")] = 1.0,
    swing: Annotated[float, typer.Option(help="Rise and fall over a day; 0: none, 1: from nothing to twice the mean.")] = 0.0,
    variation: Annotated[float, typer.Option(help="Of the intervals; 1: by chance, 3: in bursts.")] = 1.0,
    prompt_tokens: Annotated[int, typer.Option(help="Mean of drawn prompts.")] = 512,
    output_tokens: Annotated[int, typer.Option(help="Mean of drawn answers.")] = 128,
    times: Annotated[
        list[str] | None, typer.Option(metavar="MODEL=FACTOR", help="What if a model is asked FACTOR times as much?")
    ] = None,
    gpu: Annotated[str, typer.Option(help="What the cards of cuda pools are, for example H200.")] = "",
    first_token_ms: Annotated[float, typer.Option(help="SLO of models that have none.")] = 2000.0,
    token_ms: Annotated[float, typer.Option(help="SLO of models that have none.")] = 200.0,
    speeds: Annotated[Path | None, typer.Option(help="Measured speeds by model (JSON), instead of the cost model's.")] = None,
    fewest: Annotated[bool, typer.Option("--fewest", help="How many devices does this load need at its SLOs?")] = False,
    target: Annotated[float, typer.Option(help="Per cent of requests within their SLO that is enough for --fewest.")] = 99.0,
    chart: Annotated[Path | None, typer.Option(help="Write memory, switches and SLO over time as a PNG.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write the trace that is replayed as csv.")] = None,
    output: OutputOption = Output.table,
) -> None:
    """Replay arrivals through a site's placement, residency and queues, with a cost model for the work. Starts nothing."""
    from gateway.cli import pictures
    from gateway.cli.simulated_site import queue_of, read_site
    from placement.simulation import Settings
    from placement.types import Slo

    pictures.check("--chart", chart)
    snapshot = read_site([Path(each) for each in site], _cache_dir(), gpu)
    known = [request.name for request in snapshot.models]
    for name in model or []:
        _check_known("--model", name, known)
    names = model or known
    if generate is not None:
        from gateway.cli.traces import generate as drawn

        arrivals = drawn(
            names, seconds, generate, seed=seed, zipf=zipf, swing=swing, variation=variation,
            prompt_tokens=prompt_tokens, output_tokens=output_tokens,
        )  # fmt: skip
    elif trace is not None:
        arrivals = _read(trace, format_, names, seed, seconds)
    else:
        raise invalid("say what to replay: --trace FILE, or --generate RATE to draw arrivals")
    arrivals = _what_if(arrivals, times or [], known, seed)
    if write is not None:
        from gateway.cli.traces import write as lines

        write.write_text("\n".join(lines(arrivals)) + "\n")
    missing = Counter(arrival.model for arrival in arrivals if arrival.model not in known)
    if missing.total() == len(arrivals):
        why = left_out(missing) if missing else "there are no requests"
        raise invalid(f"nothing to replay: {why}; the site has {', '.join(known)}")
    settings = Settings(slo=Slo(first_token_ms / 1000, token_ms / 1000), speeds=_speeds(speeds), sample_s=_sample_s(arrivals))
    if fewest:
        from placement.capacity import fewest as capacities

        if missing:
            typer.echo(left_out(missing), err=True)
        show_capacity(capacities(snapshot, arrivals, target / 100, queue_of, settings), target / 100, output)
        return
    outcome, spent_s, refusals = _run(snapshot, arrivals, settings)
    show(outcome, spent_s, refusals, missing, output)
    if chart is not None:
        from gateway.cli.chart import draw

        draw(outcome, f"{len(arrivals)} requests, {outcome.within_slo:.1%} within their SLO", chart)


def _run(snapshot: Snapshot, arrivals: Sequence[Arrival], settings: Settings) -> tuple[Outcome, float, dict[str, str]]:
    from gateway.cli.simulated_site import queue_of
    from placement.replanning import replan
    from placement.simulation import Simulation

    plan = replan(snapshot)
    started = time.process_time()
    outcome = Simulation(snapshot, plan, queue_of, settings).run(arrivals)
    return outcome, time.process_time() - started, {name: reasons[0].message for name, reasons in plan.refusals.items()}


def _read(trace: Path, format_: Format, names: Sequence[str], seed: int, seconds: float) -> list[Arrival]:
    from gateway.cli import traces

    try:
        match format_:
            case Format.csv:
                with trace.open() as lines:
                    return traces.read(lines)
            case Format.azure:
                with trace.open() as lines:
                    return traces.read_azure(lines, names[0])
            case Format.burstgpt:
                with trace.open() as lines:
                    return traces.read_burstgpt(lines, dict(zip(("ChatGPT", "GPT-4"), names, strict=False)))
            case Format.servegen:
                return _servegen(trace, names, seed, seconds)
    except OSError as error:
        raise invalid(f"{error.filename or trace}: {error.strerror or error}") from error
    except traces.TraceError as error:
        raise invalid(f"{trace}: {error}") from error


def _servegen(folder: Path, names: Sequence[str], seed: int, seconds: float) -> list[Arrival]:
    from gateway.cli.traces import read_servegen

    files = sorted(folder.glob("chunk-*-trace.csv"), key=lambda file: int(file.name.split("-")[1]))
    pairs = [(file, file.with_name(file.name.replace("-trace.csv", "-dataset.json"))) for file in files]
    whole = [(file, dataset) for file, dataset in pairs if dataset.exists()]
    if not whole:
        raise invalid(
            f"{folder}: no chunk-N-trace.csv with its chunk-N-dataset.json in it; ServeGen keeps each client as these two files"
        )
    if len(whole) < len(pairs):
        alone = ", ".join(file.name for file, dataset in pairs if not dataset.exists())
        typer.echo(f"left out, for their dataset is not there: {alone}", err=True)
    clients = {
        name: (file.read_text().splitlines(), dataset.read_text()) for name, (file, dataset) in zip(names, whole, strict=False)
    }
    return read_servegen(clients, seed, seconds)


def _check_known(option: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise invalid(f"{option}: the site has no model `{name}`, only {', '.join(known)}; routes are not replayed")


def _what_if(arrivals: list[Arrival], times: Sequence[str], known: Sequence[str], seed: int) -> list[Arrival]:
    from gateway.cli.traces import scaled

    for each in times:
        name, _, factor = each.partition("=")
        try:
            share = float(factor)
        except ValueError as error:
            raise invalid(f"--times {each}: write MODEL=FACTOR, for example --times {known[0]}=2") from error
        _check_known("--times", name, known)
        arrivals = scaled(arrivals, name, share, seed)
    return arrivals


def _sample_s(arrivals: Sequence[Arrival]) -> float:
    """About 200 samples."""
    return max(1.0, round((arrivals[-1].time_s if arrivals else 0.0) / 200))


def _speeds(file: Path | None) -> dict | None:
    if file is None:
        return None
    import msgspec

    from placement.speed import Speed

    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Speed])
    except (OSError, msgspec.MsgspecError) as error:
        raise invalid(f"--speeds {file}: {error}") from error


def _cache_dir() -> Path:
    from gateway.site.home import Home

    return Home.from_environment().cache_dir
