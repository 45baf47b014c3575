"""Prometheus and Grafana for the site on this machine, where their binaries are: `yard dashboards up`.

The ports are those at which the Ray dashboard's Metrics tab looks for them. Both listen on loopback, in sessions of their own
that also `yard down` ends.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from gateway.api.errors import ErrorCode, YardError, invalid, unavailable
from gateway.site.client_tls import SYSTEM_CA
from gateway.site.home import RUN_VARIABLE, Home, write_private
from gateway.site.processes import Mark, is_alive, mark, start_session, stop
from gateway.site.state import SiteState

OPS = Path(__file__).resolve().parents[2] / "ops"
PROMETHEUS_PORT, GRAFANA_PORT = 9090, 3000
SCRAPE_S = 5
START_S = 20.0
_GRACE_S = 5.0
_GRAFANA = (("grafana", "server"), ("grafana-server",), ("/usr/share/grafana/bin/grafana", "server"))


class Running(msgspec.Struct, frozen=True):
    prometheus: Mark | None = None
    grafana: Mark | None = None
    prometheus_port: int = PROMETHEUS_PORT
    grafana_port: int = GRAFANA_PORT


def up(home: Home, site: SiteState, *, prometheus_port: int = PROMETHEUS_PORT, grafana_port: int = GRAFANA_PORT) -> Running:
    """Grafana is left out where it is not installed. YardError without Prometheus, or when one of them does not start."""
    binary = shutil.which("prometheus")
    if binary is None:
        raise invalid("prometheus is not installed: `apt install prometheus`, or put its binary on the PATH")
    down(home)
    directory = home.path / "dashboards"
    directory.mkdir(exist_ok=True)
    config = directory / "prometheus.yml"
    config.write_text(yaml.safe_dump(prometheus_config(site, home.run_dir / "ray"), sort_keys=False))
    command = [binary, f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{prometheus_port}", "--storage.tsdb.retention.time=15d"]
    running = Running(prometheus_port=prometheus_port, grafana_port=grafana_port)
    running = _keep(home, msgspec.structs.replace(running, prometheus=_start(home, "prometheus", command, prometheus_port)))
    if (grafana := _grafana()) is not None:
        options = _grafana_options(directory, home.run_dir / "ray", prometheus_port, grafana_port)
        running = _keep(
            home, msgspec.structs.replace(running, grafana=_start(home, "grafana", [*grafana, *options], grafana_port))
        )
    return running


def down(home: Home) -> bool:
    """Whether something ran."""
    found = load(home)
    leaders = [leader for leader in (found.prometheus, found.grafana) if leader is not None and is_alive(leader)]
    if left := stop(leaders, None, _GRACE_S):
        raise YardError(ErrorCode.INTERNAL, f"processes {', '.join(str(process.pid) for process in left)} do not end")
    _file(home).unlink(missing_ok=True)
    return bool(leaders)


def load(home: Home) -> Running:
    try:
        return msgspec.json.decode(_file(home).read_bytes(), type=Running)
    except (OSError, msgspec.DecodeError):
        return Running()


def prometheus_config(site: SiteState, ray_session: Path) -> dict[str, Any]:
    """The gateways of this machine, and Ray's own metrics where Ray says that they are."""
    gateways: dict[str, Any] = {"job_name": "modelyard", "static_configs": [{"targets": [site.http_address]}]}
    if site.tls is not None:
        trust = {} if site.tls.ca == SYSTEM_CA else {"ca_file": site.tls.ca}
        shown = {"cert_file": site.tls.cert, "key_file": site.tls.key} if site.tls.cert else {}
        gateways |= {"scheme": "https", "tls_config": {**trust, **shown, "server_name": site.tls.name}}
    ray = {"job_name": "ray", "file_sd_configs": [{"files": [str(ray_session / "prom_metrics_service_discovery.json")]}]}
    return {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(OPS / "prometheus" / "rules.yaml")],
        "scrape_configs": [gateways, ray],
    }


def _grafana() -> Sequence[str] | None:
    return next((command for command in _GRAFANA if shutil.which(command[0])), None)


def _grafana_options(directory: Path, ray_session: Path, prometheus_port: int, port: int) -> list[str]:
    """Provisioned with our dashboards beside Ray's own, for anyone on this machine to look at."""
    provisioning = directory / "provisioning"
    providers = [{"name": "modelyard", "folder": "Modelyard", "type": "file", "options": {"path": str(OPS / "grafana")}}]
    rays = ray_session / "session_latest" / "metrics" / "grafana" / "dashboards"
    if rays.is_dir():
        providers.append({"name": "ray", "folder": "Ray", "type": "file", "options": {"path": str(rays)}})
    source = {"name": "Prometheus", "uid": "modelyard", "type": "prometheus", "access": "proxy", "isDefault": True}
    source["url"] = f"http://127.0.0.1:{prometheus_port}"
    documents = {"datasources": {"datasources": [source]}, "dashboards": {"providers": providers}}
    for name, content in documents.items():
        (provisioning / name).mkdir(parents=True, exist_ok=True)
        (provisioning / name / "modelyard.yaml").write_text(yaml.safe_dump({"apiVersion": 1, **content}))
    settings = {
        "server.http_addr": "127.0.0.1",
        "server.http_port": str(port),
        "paths.data": str(directory / "grafana"),
        "paths.provisioning": str(provisioning),
        "auth.anonymous.enabled": "true",
        "auth.anonymous.org_role": "Viewer",
        "security.allow_embedding": "true",
        "analytics.reporting_enabled": "false",
        "analytics.check_for_updates": "false",
    }
    home = ["--homepath", "/usr/share/grafana"] if Path("/usr/share/grafana").is_dir() else []
    return [*home, *(f"cfg:default.{key}={value}" for key, value in settings.items())]


def _start(home: Home, name: str, command: Sequence[str], port: int) -> Mark:
    """Waits until it listens. YardError with the last line of its log when it does not."""
    log = home.logs_dir / f"{name}.log"
    process = start_session(command, {**os.environ, RUN_VARIABLE: str(home.run_dir)}, log)
    leader = mark(process.pid)
    give_up = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < give_up:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return leader
        time.sleep(0.1)
    stop([leader], None, _GRACE_S)
    lines = log.read_text(errors="replace").strip().splitlines()
    raise unavailable(f"{name} does not listen on 127.0.0.1:{port}: {lines[-1] if lines else 'its log is empty'} (log: {log})")


def _keep(home: Home, running: Running) -> Running:
    write_private(_file(home), msgspec.json.encode(running))
    return running


def _file(home: Home) -> Path:
    return home.path / "dashboards.json"
