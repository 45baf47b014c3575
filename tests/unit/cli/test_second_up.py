"""What `yard up` does on a site that ops have worked on since the first one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.api.errors import ErrorCode, YardError
from gateway.api.manifest import read_text
from gateway.api.proto import admin_pb2 as pb
from gateway.cli import options
from gateway.cli.app import app
from gateway.site import desired, down, draining, state
from gateway.site.board import Board
from gateway.site.home import Home
from gateway.site.processes import Mark
from gateway.site.site_files import DEFAULT_SITE, read_site
from gateway.site.state import SiteState
from gateway.site.up import _is_running, ask_canary, refuse_other_ports

FILE = """
apiVersion: modelyard/v1
kind: Model
metadata: {name: NAME}
spec: {source: x}
"""


class Store:
    """Answers as the admin service of a site does."""

    def __init__(self) -> None:
        self.revision = 0
        self.objects: dict[str, pb.Object] = {}

    def get(self) -> pb.GetResponse:
        return pb.GetResponse(objects=self.objects.values(), revision=self.revision)

    def apply(self, objects: list[pb.Object]) -> pb.ApplyResponse:
        self.revision += 1
        self.objects |= {item.name: item for item in objects}
        changes = [pb.Change(kind=item.kind, name=item.name, notes=["it restarts"]) for item in objects]
        return pb.ApplyResponse(revision=self.revision, changes=changes)


def test_what_ops_deleted_stays_deleted_until_its_file_changes(tmp_path: Path) -> None:
    store, home = Store(), Home(tmp_path)
    files = [read_text(FILE.replace("NAME", name), "site")[0] for name in ("m", "n")]
    assert desired.reconcile(store, home, files).written == ("Model m", "Model n")  # type: ignore[arg-type]
    del store.objects["n"]
    for _ in range(2):
        again = desired.reconcile(store, home, files)  # type: ignore[arg-type]
        assert (again.written, again.kept, again.deleted) == ((), (), ("Model n",))
    files[1] = read_text(FILE.replace("NAME", "n").replace("x}", "y}"), "site")[0]
    last = desired.reconcile(store, home, files)  # type: ignore[arg-type]
    assert (last.written, last.notes) == (("Model n",), ("Model n: it restarts",))
    assert desired.reconcile(Store(), home, files).written == ("Model m", "Model n"), "a new store gets all"  # type: ignore[arg-type]


def test_what_is_deleted_is_not_waited_for() -> None:
    site = read_site(DEFAULT_SITE, {}, None).without(["Model smollm2", "Route chat"])
    assert "smollm2" not in site.replicas()
    assert site.default_route != "chat"


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({}, False),
        ({"grpc_port": 0}, False),
        ({"grpc_port": 7001}, False),
        ({"grpc_port": 7002}, True),
        ({"http_port": 8000}, True),
    ],
)
def test_only_ports_of_the_command_line_are_asked_for(given: dict[str, int], refused: bool) -> None:
    running = SiteState(
        site="local", site_dir="d", phase="running", boot_id="b", owner=Mark(1, 1.0),
        grpc_port=7001, http_port=7003, dashboard_port=7004
    )  # fmt: skip
    site = read_site(DEFAULT_SITE, given, None)
    if refused:
        with pytest.raises(YardError, match="on ports 7001, 7003, 7004"):
            refuse_other_ports(running, site)
    else:
        refuse_other_ports(running, site)


@pytest.mark.parametrize("content", ["", "{", '{"site": 3}', "[]"])
def test_a_damaged_file_of_the_home_is_named_with_the_fix(tmp_path: Path, content: str) -> None:
    home = Home(tmp_path)
    (tmp_path / "secrets.json").write_text(content)
    with pytest.raises(YardError, match=r"secrets\.json cannot be read.*remove it"):
        home.secrets()
    home.applied_file.write_text(content)
    store = Store()
    store.revision = 1
    with pytest.raises(YardError, match=r"applied\.json cannot be read.*remove it"):
        desired.reconcile(store, home, [])  # type: ignore[arg-type]


def test_status_of_a_stopped_site_says_that_it_is_down(tmp_path: Path) -> None:
    Home(tmp_path).last_site_file.write_text("quick")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "DEFAULT_SERVER", f"127.0.0.1:{port}")
        result = CliRunner().invoke(app, ["status"], env={"MODELYARD_HOME": str(tmp_path), "MODELYARD_SERVER": ""})
    assert isinstance(result.exception, YardError)
    assert result.exception.message == "site quick is down; start it with `yard up`"


def test_commands_of_a_stopped_site_ask_no_other_that_listens_at_the_usual_address(tmp_path: Path) -> None:
    Home(tmp_path).last_site_file.write_text("quick")
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "DEFAULT_SERVER", f"127.0.0.1:{other.getsockname()[1]}")
        for words in (["status"], ["ps"], ["delete", "model", "m"], ["run", "chat", "Hello"]):
            result = CliRunner().invoke(app, words, env={"MODELYARD_HOME": str(tmp_path), "MODELYARD_SERVER": ""})
            assert isinstance(result.exception, YardError), words
            assert result.exception.message.startswith("site quick is down; start it with `yard up`"), words


def test_a_site_that_needs_keys_comes_up_without_one() -> None:
    """Else the first tenant with keys would be the last thing that its ops can do."""

    class Closed:
        def chat(self, request: object, timeout_s: float) -> None:
            raise YardError(ErrorCode.UNAUTHENTICATED, "this site asks for an API key")

    with Board() as board:
        assert ask_canary(Closed(), "chat", board) is None  # type: ignore[arg-type]


def test_a_site_whose_down_was_cut_short_is_not_taken_for_running(made_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home = made_home
    running = SiteState(site="s", site_dir="", phase="running", boot_id=state.boot_id(), owner=Mark(1, 0.0))
    state.save(home, running)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(down, "is_complete", lambda *_: True)
    monkeypatch.setattr(draining, "drain", interrupted)
    assert _is_running(running)
    with Board() as board, pytest.raises(KeyboardInterrupt):
        down.down(home, board)
    left = state.load(home)
    assert left is not None
    assert not _is_running(left)
