"""dashboards up, dashboards down: Prometheus and Grafana for the site on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

PrometheusPort = Annotated[int, typer.Option("--prometheus-port", help="The Ray dashboard looks at 9090.")]
GrafanaPort = Annotated[int, typer.Option("--grafana-port", help="The Ray dashboard looks at 3000.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Prometheus and Grafana for the site on this machine.", no_args_is_help=True)
    group.command()(up)
    group.command()(down)
    app.add_typer(group, name="dashboards")


def up(prometheus_port: PrometheusPort = 9090, grafana_port: GrafanaPort = 3000) -> None:
    """Start them, with the site's dashboards and red lines, where their binaries are installed."""
    from gateway.api.errors import not_found
    from gateway.site import dashboards, state
    from gateway.site.home import Home

    home = Home.from_environment()
    site = state.load(home)
    if site is None:
        raise not_found("no site runs here; start it with `yard up`")
    running = dashboards.up(home, site, prometheus_port=prometheus_port, grafana_port=grafana_port)
    typer.echo(f"  Prometheus  http://127.0.0.1:{running.prometheus_port}/alerts")
    if running.grafana is None:
        typer.echo("  Grafana     is not installed; import ops/grafana/*.json into any other")
    else:
        typer.echo(f"  Grafana     http://127.0.0.1:{running.grafana_port}/dashboards")
        typer.echo(f"  Ray         http://127.0.0.1:{site.dashboard_port}/#/metrics")


def down() -> None:
    """Stop them. What Prometheus has stored stays."""
    from gateway.site import dashboards
    from gateway.site.home import Home

    typer.echo("stopped" if dashboards.down(Home.from_environment()) else "nothing ran")
