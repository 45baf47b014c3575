"""`yard doctor`, `yard top` and shell completion."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gateway.api.checkpoint.seal import seal
from gateway.api.records import GroupRecord, ModelTotals, PoolRecord, RankRecord, SiteStatus
from gateway.cli.top import bar, speed, view
from gateway.site import doctor
from gateway.site.doctor import Finding, examine
from gateway.site.home import Home
from gateway.site.site_files import DEFAULT_SITE, read_site

MIB = 2**20


def test_damaged_converted_weights_are_named(tmp_path: Path) -> None:
    home = Home(tmp_path)
    (home.cache_dir / "weights").mkdir(parents=True)
    for name in ("whole", "damaged"):
        file = home.cache_dir / "weights" / f"{name}.safetensors"
        file.write_bytes(b"x" * 100)
        seal(file, file)
    file.write_bytes(b"x" * 99)
    bad, good = doctor._weights(home)
    assert (bad.verdict, bad.text) == ("bad", f"{file}: it has 99 bytes and was made with 100")
    assert "1 converted models are whole" in good.text


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Finding]:
        raise OSError("no such thing")

    for slow in ("_mpi", "_nccl", "_gpus"):
        monkeypatch.setattr(doctor, slow, lambda *_: [])
    monkeypatch.setattr(doctor, "_packages", broken)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        site = read_site(DEFAULT_SITE, {"grpc_port": port, "http_port": 0, "dashboard_port": 0}, None)
        found = list(examine(Home(tmp_path / "home"), site))
    bad = {finding.what: finding for finding in found if finding.verdict == "bad"}
    assert "no such thing" in bad["broken"].text
    assert f"port {port}" in bad["ports"].text
    assert f"pid {os.getpid()}" in bad["ports"].text, "names who holds the port"
    assert {"python", "disk", "memory", "redis", "models"} <= {finding.what for finding in found if finding.verdict == "good"}


def test_redis_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for slow in ("_mpi", "_nccl", "_gpus", "_ports", "_models"):
        monkeypatch.setattr(doctor, slow, lambda *_: [])
    site = read_site(DEFAULT_SITE, {}, "redis://user:hidden@127.0.0.1:1/0")
    [finding] = [finding for finding in examine(Home(tmp_path / "home"), site) if finding.verdict == "bad"]
    assert "127.0.0.1:1" in finding.text
    assert "hidden" not in finding.text


def pool(tokens: int, incarnation: str = "one") -> PoolRecord:
    ledger = (("m", "weights", 50 * MIB), ("m", "kv_floor", 25 * MIB), ("m", "workspace", 10 * MIB))
    rank = RankRecord(index=0, node="n", pid=1, device="cpu", capacity_bytes=100 * MIB, ledger=ledger, utilization=0.4)
    group = GroupRecord("m", 1, 1, (0,), 1, 1, "ready", running=3, waiting=2, kv_bytes=100, kv_used_bytes=25)
    return PoolRecord("a", "", incarnation, "n", 1, "cpu", 1, 1, 0.0, (rank,), (group,), totals=(ModelTotals("m", 0, 0, tokens),))


def test_top_shows_memory_and_speed() -> None:
    before, now = pool(100), pool(150)
    assert bar(now.ranks[0]) == "█" * 20 + "▓" * 10 + "░" * 4 + "·" * 6
    assert speed(now, before, "m", 2.0) == 25.0
    assert speed(pool(10, "two"), before, "m", 2.0) == 0.0, "another driver counts from nothing"
    status = SiteStatus("s", 1, "degraded", (now,), (), None, (), ())
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view(status, status, 0.0))
    text = console.export_text()
    assert "REDIS AWAY" in text
    assert "40%" in text
    assert "25% of 100 B" in text


def test_the_shell_completes_commands() -> None:
    environment = {**os.environ, "_YARD_COMPLETE": "complete_bash", "COMP_WORDS": "yard dash", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-m", "gateway.cli"], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["dashboards"]
    script = subprocess.run([sys.executable, "-m", "gateway.cli", "completion", "bash"], capture_output=True, text=True)
    assert "_YARD_COMPLETE=complete_bash" in script.stdout
