"""`yard status` and `yard doctor` on sites of which something is gone, or that were begun or taken down only by half."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import msgspec
import pytest

from gateway.api.errors import YardError
from gateway.api.records import ControllerRecord, SiteStatus
from gateway.cli import house
from gateway.cli.options import Output
from gateway.site import doctor, half_sites, ray_health, state
from gateway.site.home import Home
from gateway.site.processes import KEPT, Mark, mark
from gateway.site.site_files import DEFAULT_SITE, read_site
from gateway.site.summary import summarize

GONE = Mark(os.getpid(), 0.0)
"""This process's id, of another one that had it before."""
MIDWAY = f"a `yard up` (pid {os.getpid()}) ended midway"


def site(phase: str, *, owner: Mark = GONE, **fields: object) -> state.SiteState:
    whole = state.SiteState(
        site="s", site_dir="", phase="running", boot_id=state.boot_id(), owner=owner, ray_address="127.0.0.1:1", grpc_port=1
    )
    return msgspec.structs.replace(whole, phase=phase, **fields)


def redis_finding(home: Home, found: state.SiteState) -> doctor.Finding:
    [finding] = doctor._redis(home, read_site(DEFAULT_SITE, {}, None), found)
    return finding


@pytest.mark.parametrize("sessions", [{}, {"ray": mark(os.getpid()), "valkey": mark(os.getpid())}])
def test_a_start_that_ended_midway_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sessions: dict[str, Mark]):
    """Whether all its processes went or only the `yard up`."""
    monkeypatch.setenv("MODELYARD_HOME", str(tmp_path))
    found = state.save(Home(tmp_path), site("starting", sessions=sessions))
    with pytest.raises(YardError, match=r"\(pid \d+\) ended midway; `yard up` starts anew, `yard down` ends what is left"):
        house.status(None, Output.table)
    files = read_site(DEFAULT_SITE, {}, None)
    [finding] = [*doctor._site(found), *doctor._ray(found), *doctor._redis(Home(tmp_path), files, found)]
    assert (finding.verdict, finding.text) == ("bad", MIDWAY)
    assert finding.advice == "`yard up` starts anew, `yard down` ends what is left"


def test_a_start_that_goes_on_is_not_called_ended(tmp_path: Path):
    found = site("starting", owner=mark(os.getpid()), ray_address="")
    assert half_sites.troubles(found) == []
    findings = [*doctor._site(found), *doctor._ray(found), redis_finding(Home(tmp_path), found)]
    assert [(item.verdict, "start" in item.text) for item in findings] == [("good", True)] * 3


@pytest.mark.parametrize(
    ("running", "gone"), [({"valkey-server"}, False), ({KEPT + "valkey-server"}, False), ({"raylet", "gcs_server"}, True)]
)
def test_an_embedded_valkey_without_a_keeper_is_gone_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: set[str], gone: bool
):
    monkeypatch.setattr(half_sites, "server_names", lambda leader: running)
    found = site("running", sessions={"valkey": mark(os.getpid())}, valkey_port=1)
    assert bool(half_sites.troubles(found)) is gone
    finding = redis_finding(Home(tmp_path), found)  # nothing listens at the port
    assert finding.verdict == "bad"
    assert "Valkey" in finding.text
    assert "--redis" not in finding.text + finding.advice, "this Redis is nobody else's to start"
    assert (finding.advice == "`yard up` starts the site anew") is gone


def test_a_down_that_was_cut_short_is_said_beside_a_site_that_serves():
    said = half_sites.begun_down(site("stopping"))
    assert "`yard down` goes on with it, `yard up` starts the site anew" in said
    assert half_sites.begun_down(site("running")) == ""
    status = SiteStatus("s", 1, "ok", (), (), ControllerRecord("c", 1, 1, 0.0), (), ())
    plain, noted = summarize(status), summarize(status, notes=(said,))
    assert noted.is_ready
    assert (noted.line, noted.problems) == (f"{plain.line}; {said}", plain.problems)
    [finding] = doctor._site(site("stopping"))
    assert (finding.verdict, finding.text) == ("warning", "a `yard down` was begun and has not ended")


def test_a_head_that_takes_connections_and_no_calls_does_not_answer(monkeypatch: pytest.MonkeyPatch):
    """As a stopped one does."""
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        address = f"127.0.0.1:{stopped.getsockname()[1]}"
        ask: Callable[[str], str] = ray_health.silence
        monkeypatch.setattr(ray_health, "silence", lambda address: ask(address, 0.3))  # type: ignore[call-arg]
        [finding] = doctor._ray(site("running", ray_address=address))
    assert (finding.verdict, "does not answer" in finding.text) == ("bad", True)


def test_a_head_that_refuses_the_call_answers():
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert ray_health.silence(f"127.0.0.1:{port}") == ""
    finally:
        server.stop(None)
