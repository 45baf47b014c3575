"""A start or an upgrade whose Ray ends under it says so at once."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from gateway.api.errors import ErrorCode, YardError, unavailable
from gateway.site import processes, ray_health, ray_watch, state, up, upgrade
from gateway.site.board import Board
from gateway.site.home import Home
from gateway.site.processes import KEPT, Mark
from gateway.site.site_files import DEFAULT_SITE, read_site

NODE, HEAD = "raylet", "gcs_server"


@pytest.mark.parametrize(
    ("running", "gone"),
    [
        ({NODE, HEAD, KEPT + HEAD}, ""),
        ({NODE, HEAD}, ""),
        ({NODE, KEPT + HEAD}, ""),
        ({NODE}, HEAD),
        ({HEAD, KEPT + HEAD}, NODE),
        (set[str](), NODE),
    ],
)
def test_only_what_nothing_starts_again_has_ended(running: set[str], gone: str):
    assert ray_health.ended(running) == gone


def without_processes(home: Home) -> state.SiteState:
    """A site that starts, with a session for its Ray that has no process."""
    return state.SiteState(
        site="s", site_dir="", phase="starting", boot_id=state.boot_id(), owner=processes.mark(os.getpid()),
        sessions={"ray": Mark(os.getpid(), 0.0)}, ray_address="127.0.0.1:1", grpc_port=1,
    )  # fmt: skip


def test_a_start_names_the_process_that_ended_instead_of_what_fails_for_want_of_it(
    made_home: Home, monkeypatch: pytest.MonkeyPatch
):
    with Board() as board:
        start = up._Start(made_home, read_site(DEFAULT_SITE, {}, None), board, None, 10.0)
        start.state = without_processes(made_home)

        def nobody_answers() -> None:
            raise unavailable("no Modelyard answers")

        monkeypatch.setattr(start, "_run", nobody_answers)
        with pytest.raises(YardError, match=r"^Ray's node process \(raylet\) ended during the start \(log: .*raylet\.out\)$"):
            start.run()


def test_the_loop_of_an_upgrade_looks_at_rays_processes(made_home: Home, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_health, "LOOK_S", 0.0)
    monkeypatch.setattr(ray_health, "server_names", lambda leader: {NODE})
    found = without_processes(made_home)

    class Silent:
        def status(self) -> None:
            return None

    def refuse() -> None:
        ray_health.refuse_ended(made_home, found, "upgrade", "; do that")

    monkeypatch.setattr(upgrade._Change, "_is_replaced", lambda *_: False)
    with Board() as board:
        change = upgrade._Change(Silent(), board, 10.0, refuse)  # type: ignore[arg-type]
        with pytest.raises(YardError, match=r"head process \(gcs_server\) ended during the upgrade .*; do that"):
            change.make("controller", lambda: None, lambda status: frozenset())


@pytest.mark.parametrize("notices", [True, False])
def test_who_waits_inside_rays_client_is_replaced(made_home: Home, monkeypatch: pytest.MonkeyPatch, notices: bool):
    monkeypatch.setattr(ray_health, "LOOK_S", 0.01)
    monkeypatch.setattr(ray_watch, "_PATIENCE_S", 10.0 if notices else 0.01)
    looked, replaced = threading.Event(), threading.Event()
    said: list[str] = []

    def look() -> None:
        looked.set()
        raise YardError(ErrorCode.INTERNAL, "it ended")

    def replace(home: Home, message: str) -> None:
        said.append(message)
        replaced.set()

    monkeypatch.setattr(ray_watch, "become_cleaner", replace)
    with Board() as board, ray_watch.watched(made_home, board, look):
        assert (looked if notices else replaced).wait(10)
    assert said == ([] if notices else ["it ended"])


def test_the_replacement_ends_what_was_started_and_says_why(made_home: Home, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    server = processes.start_session(["sleep", "60"], os.environ, tmp_path / "log")
    state.save(made_home, without_processes(made_home).with_session("ray", processes.mark(server.pid)))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(SystemExit, match="1"):
            ray_watch.main(str(made_home.path), "it ended")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert server.poll() is not None
    assert state.load(made_home) is None
    assert capsys.readouterr().err == "yard: it ended\n"
