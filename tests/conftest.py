from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from house import House
from small_disk import small_disk
from valkey_server import ValkeyServer

from gateway.site.home import Home


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """A running Valkey for the whole session. Do not stop or flush it; take a `site` name of your own instead."""
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """A running Valkey of one test, to stop, pause and flush."""
    server = ValkeyServer(tmp_path_factory.mktemp("own-valkey"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def site() -> str:
    """A site name that nothing else uses."""
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def made_home(tmp_path: Path) -> Iterator[Home]:
    """Its directories exist, those outside of its own path too; they go with the test."""
    home = Home(tmp_path / "home")
    home.create()
    yield home
    for directory in (home.run_dir, home.shared_memory_dir):
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """The default site, up. Tests that break something in it wait until it has healed."""
    home = tmp_path_factory.mktemp("house")
    with small_disk(home):
        house = House(home, "--gateways", "2")
        started = house.up()
        assert started.returncode == 0, f"{started.stdout}\n{started.stderr}"
        yield house
        house.down()
        assert not house.processes(), "processes outlive the site"
