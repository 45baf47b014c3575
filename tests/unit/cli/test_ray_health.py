"""A site whose Ray lost its head process says so, and what happens next."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from gateway.api.errors import YardError
from gateway.cli import house
from gateway.cli.options import Output
from gateway.site import doctor, down, keeper, processes, ray_health, state
from gateway.site.home import Home
from gateway.site.processes import KEPT, Mark

NODE, HEAD = "raylet", "gcs_server"
ALL = {NODE, HEAD, KEPT + HEAD}


def running_site(home: Home) -> state.SiteState:
    """Its Ray is a session without any process of Ray."""
    home.path.mkdir(exist_ok=True)
    return state.save(
        home,
        state.SiteState(
            site="s", site_dir="", phase="running", boot_id=state.boot_id(), owner=processes.mark(os.getpid()),
            sessions={"ray": Mark(os.getpid(), 0.0)}, ray_address="127.0.0.1:1", grpc_port=1,
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("running", "words"),
    [
        (ALL, ""),
        ({NODE, HEAD}, ""),
        ({NODE, KEPT + HEAD}, "is being started again"),
        ({NODE}, "`yard up` ends what is left"),
        ({HEAD, KEPT + HEAD}, "(raylet) is gone"),
    ],
)
def test_what_is_gone_decides_what_is_said(running: set[str], words: str):
    said = ray_health.judge(running)
    assert words in said
    assert bool(said) == bool(words)


def test_status_and_doctor_say_it_though_no_gateway_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MODELYARD_HOME", str(tmp_path))
    found = running_site(Home.from_environment())
    with pytest.raises(YardError, match=r"Ray's node process .* `yard up` starts the site anew"):
        house.status(None, Output.table)
    [finding] = doctor._ray(found)
    assert (finding.verdict, finding.advice) == ("bad", "`yard up` starts the site anew")


def test_a_server_that_its_keeper_is_starting_again_counts_as_running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    found = running_site(Home(tmp_path))
    for running, complete in (({NODE, KEPT + HEAD}, True), ({NODE}, False)):
        monkeypatch.setattr(down, "server_names", lambda leader, running=running: running)
        assert down.is_complete(found) is complete


def test_what_a_keeper_keeps_is_read_from_its_command(tmp_path: Path):
    wait = tmp_path / "gcs_server"
    wait.write_text("#!/bin/sh\nexec sleep 60\n")
    wait.chmod(0o700)
    process = processes.start_session(
        [sys.executable, "-I", keeper.__file__, str(wait), "--port=1"], os.environ, tmp_path / "log"
    )
    leader = processes.mark(process.pid)
    try:
        end = time.monotonic() + 10
        while KEPT + HEAD not in processes.server_names(leader):  # the kernel shows a command a moment after it runs
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        processes.stop([leader], None, grace_s=5.0)
        process.wait(5)
