"""A site that comes back is where its clients look for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gateway.site.home import Home
from gateway.site.last_listen import as_last_time, remember
from gateway.site.processes import Mark
from gateway.site.site_files import DEFAULT_SITE, SiteFiles, read_site
from gateway.site.state import SiteState

USED = {"grpc_port": 7001, "http_port": 8000, "dashboard_port": 8265}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEFAULT_SITE, tmp_path / "site"))


@pytest.fixture
def home(tmp_path: Path, directory: Path) -> Home:
    """Of a site that was started with `--host 0.0.0.0 --grpc-port 7001`."""
    home = Home(tmp_path)
    files = read_site(directory, {"host": "0.0.0.0", "grpc_port": 7001}, None)
    state = SiteState(site="local", site_dir="", phase="running", boot_id="", owner=Mark(1, 0.0), bind_host="0.0.0.0", **USED)  # type: ignore[arg-type]
    remember(home, files, state)
    return home


def listens(files: SiteFiles) -> tuple[str, int, int]:
    listen = files.spec.listen
    return listen.host, listen.grpc_port, listen.http_port


def edit(directory: Path, old: str, new: str) -> None:
    file = directory / "site.yaml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_a_site_comes_back_where_it_was_and_says_so(home: Home, directory: Path) -> None:
    files, words = as_last_time(home, read_site(directory, {}, None))
    assert listens(files) == ("0.0.0.0", 7001, 8000)
    assert not files.is_loopback
    assert words == "--host 0.0.0.0 (site.yaml: 127.0.0.1), --grpc-port 7001 (site.yaml: 50051)"


def test_options_come_first(home: Home, directory: Path) -> None:
    files, words = as_last_time(home, read_site(directory, {"grpc_port": 50051, "host": "127.0.0.1"}, None))
    assert (listens(files), words) == (("127.0.0.1", 50051, 8000), "")


def test_what_changed_in_the_file_since_holds(home: Home, directory: Path) -> None:
    edit(directory, "grpc_port: 50051", "grpc_port: 50052")
    edit(directory, "http_port: 8000", "http_port: 8001")
    assert listens(as_last_time(home, read_site(directory, {}, None))[0]) == ("0.0.0.0", 50052, 8001)


def test_any_free_port_of_the_file_stays_any(tmp_path: Path, directory: Path) -> None:
    edit(directory, "grpc_port: 50051", "grpc_port: 0")
    files = read_site(directory, {}, None)
    remember(Home(tmp_path), files, SiteState(site="local", site_dir="", phase="running", boot_id="", owner=Mark(1, 0.0), **USED))  # type: ignore[arg-type]
    assert as_last_time(Home(tmp_path), files)[0].spec.listen.grpc_port == 0


def test_another_site_or_a_damaged_memory_leaves_the_file_as_it_is(home: Home, directory: Path) -> None:
    edit(directory, "name: local", "name: other")
    assert as_last_time(home, read_site(directory, {}, None))[1] == ""
    edit(directory, "name: other", "name: local")
    assert as_last_time(home, read_site(directory, {}, None))[1] != ""
    for content in (b"{", b"\xff", b"[]"):
        home.last_listen_file.write_bytes(content)
        assert as_last_time(home, read_site(directory, {}, None))[1] == ""
