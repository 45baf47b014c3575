"""Red lines and dashboards, asked of a real Prometheus that scrapes a gateway; and that each alert has its page."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml
from free_port import free_port
from lone_gateway import LoneGateway, ids_of
from scripted_pool import ScriptedPool

from gateway.api.buckets import Buckets
from gateway.api.records import ControllerRecord, ModelTotals, RankRecord, SwitchRecord
from gateway.site import dashboards
from gateway.site.client_tls import ClientTls
from gateway.site.dashboards import OPS, prometheus_config
from gateway.site.home import Home
from gateway.site.processes import Mark, is_alive
from gateway.site.state import SiteState
from gateway.state.snapshot import Observed

RULES = yaml.safe_load((OPS / "prometheus" / "rules.yaml").read_text())
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
DASHBOARDS = {file.stem: json.loads(file.read_text()) for file in sorted((OPS / "grafana").glob("*.json"))}
NEEDS_PROMETHEUS = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="asks a real Prometheus (apt install prometheus)"
)
EMPTY_HERE = {"Routes flipped", "Standing by in host memory"}


def state(tls: ClientTls | None = None, **changes: Any) -> SiteState:
    owner = Mark(1, 0.0)
    return SiteState(site="s", site_dir="/", phase="running", boot_id="b", owner=owner, tls=tls, **changes)


def queries() -> list[tuple[str, str]]:
    return [
        (f"{name}: {panel['title']}", target["expr"])
        for name, board in DASHBOARDS.items()
        for panel in board["panels"]
        for target in panel["targets"]
    ]


def test_the_dashboards_are_those_of_their_script() -> None:
    check = subprocess.run([sys.executable, OPS / "grafana" / "build.py"], capture_output=True, text=True)
    assert check.returncode == 0, check.stderr
    assert set(DASHBOARDS) == {"capacity", "models", "gateways", "switches"}


@pytest.mark.parametrize("alert", sorted(ALERTS))
def test_every_alert_has_a_page_that_says_what_to_do(alert: str) -> None:
    page = (OPS.parent / ALERTS[alert]["annotations"]["runbook"]).read_text()
    assert page.startswith("# ")
    assert "\n1. " in page
    known = set(re.findall(r"`yard ([a-z]+)", page))
    assert known <= {"ps", "park", "doctor", "up", "restore", "events", "route", "describe", "plan", "apply", "bench"}


def test_a_site_with_tls_is_scraped_with_what_yard_trusts() -> None:
    config = prometheus_config(state(ClientTls("/ca.pem", "/c.pem", "/k.pem", "gate")), Path("/ray"))
    job = config["scrape_configs"][0]
    assert job["scheme"] == "https"
    assert job["tls_config"] == {"ca_file": "/ca.pem", "cert_file": "/c.pem", "key_file": "/k.pem", "server_name": "gate"}


@NEEDS_PROMETHEUS
async def test_dashboards_up_scrapes_the_site_and_down_ends_it(lone: LoneGateway, made_home: Home) -> None:
    home = made_home
    site = state(http_port=lone.servers.http_port)
    running = await asyncio.to_thread(dashboards.up, home, site, prometheus_port=free_port(), grafana_port=free_port())
    try:
        assert running == dashboards.load(home)
        url = f"http://127.0.0.1:{running.prometheus_port}/api/v1"
        async with httpx.AsyncClient() as client, asyncio.timeout(30):
            targets = []
            while not targets:
                targets = (await client.get(f"{url}/targets")).json()["data"]["activeTargets"]
            assert targets[0]["scrapeUrl"] == f"{lone.http}/metrics"
            assert (await client.get(f"{url}/rules")).json()["data"]["groups"]
    finally:
        assert await asyncio.to_thread(dashboards.down, home)
        home.clear_run_dirs()
    assert running.prometheus is not None
    assert not is_alive(running.prometheus)


def observe(lone: LoneGateway, pool: ScriptedPool, turn: int) -> None:
    """A pool in trouble: fragmented, idle though requests wait, slow wakes, restarts, nothing placed."""
    took = Buckets()
    for _ in range(turn + 1):
        took.add(0.2)
    rank = RankRecord(
        index=0,
        node="n",
        pid=1,
        device="cuda",
        capacity_bytes=1000,
        ledger=(("m", "weights", 600), ("m", "kv_used", 100)),
        utilization=0.1,
        used_bytes=800,
        total_bytes=1000,
        link_bytes_per_s=1e9,
    )
    wake = SwitchRecord("wake", turn + 1, 0.2, 0.2, 0.2, took.total_s, 2 * 10**9 * turn, 0.3, tuple(took.counts))
    totals = (ModelTotals("m", 100 * turn, 40 * turn, 70 * turn, turn),)
    extra = {"ranks": (rank,), "switches": (wake,), "totals": totals, "rank_restarts": turn, "held": 2, "steps": turn}
    record = pool.record(extra=extra)
    group = msgspec.structs.replace(
        record.groups[0], waiting=5, kv_bytes=100, kv_used_bytes=10, kv_hole_bytes=60, standby_bytes=9
    )
    record = msgspec.structs.replace(record, groups=(group,))
    lone.view.apply_observed(Observed({"a": record}, {}, ControllerRecord("c", 1, 1, 0.0, unplaced={"x": ("no room",)})))


@NEEDS_PROMETHEUS
async def test_queries_and_red_lines_of_a_real_prometheus(
    lone: LoneGateway, pool: ScriptedPool, byte_level: Path, tmp_path: Path
) -> None:
    pool.script = lambda sequence: sequence.end("length", tokens=ids_of(byte_level, "yes indeed"))
    port = free_port()
    site = state(http_port=lone.servers.http_port)
    config = prometheus_config(site, tmp_path)
    config["global"] = {"scrape_interval": "300ms", "evaluation_interval": "500ms"}
    rules = (OPS / "prometheus" / "rules.yaml").read_text()
    (tmp_path / "rules.yaml").write_text(re.sub(r"for: \w+", "for: 0s", rules).replace("interval: 15s", "interval: 500ms"))
    config["rule_files"] = [str(tmp_path / "rules.yaml")]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        str(shutil.which("prometheus")),
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=10) as client, asyncio.timeout(60):
            turn = 0
            wanted = {"DevicesIdleWhileQueued", "KvFragmented", "WakeSlow", "GroupsRestart", "ModelsUnplaced", "RequestsFail"}
            firing: set[str] = set()
            while not wanted <= firing or turn < 12:
                observe(lone, pool, turn)
                for prompt in ("x", "y" * 400):  # the second is longer than the context: refused, and counted
                    async with httpx.AsyncClient() as gateway:
                        await gateway.post(f"{lone.http}/v1/completions", json={"model": "m", "prompt": prompt})
                lone.metrics.requests.labels("http", "m", "internal").inc()
                turn += 1
                await asyncio.sleep(0.4)
                try:
                    alerts = (await client.get("alerts")).json()["data"]["alerts"]
                except httpx.TransportError:
                    continue  # it is starting
                firing = {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}
            assert not firing & {"RedisDegraded", "NoController", "PoolDown", "FirstTokenSlow"}
            empty = []
            for name, query in queries():
                answer = (await client.get("query", params={"query": query.replace("$__rate_interval", "10s")})).json()
                assert answer["status"] == "success", f"{name}: {answer}"
                if not answer["data"]["result"]:
                    empty.append(name.partition(": ")[2])
            assert set(empty) <= EMPTY_HERE
    finally:
        process.terminate()
        await process.wait()
