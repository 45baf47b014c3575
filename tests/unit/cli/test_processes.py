"""`yard down` ends what the site started, whatever became of it in between, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gateway.site import processes
from gateway.site.home import RUN_VARIABLE
from gateway.site.processes import Mark

SLEEP = "import time; time.sleep(60)"
# Leaves a grandchild behind in the session, which prints its id and is then nobody's child.
ORPHAN = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True)"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def stray(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that left its session but carries the site's mark, as an MPI rank may."""
    environment = {**os.environ, RUN_VARIABLE: str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", SLEEP], env=environment, start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_a_process_whose_parent_ended_is_found_by_its_session(log: Path):
    process = processes.start_session([sys.executable, "-c", ORPHAN], os.environ, log)
    leader = processes.mark(process.pid)
    process.wait(10)
    orphan = int(log.read_text())
    assert [member.pid for member in processes.members([leader])] == [orphan]
    assert processes.stop([leader], None, grace_s=5.0) == []
    assert not psutil.pid_exists(orphan)


def test_a_process_that_ignores_the_request_to_end_is_killed(log: Path):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    process = processes.start_session([sys.executable, "-c", code], os.environ, log)
    leader = processes.mark(process.pid)
    while log.read_text() != "on\n":
        assert process.poll() is None
    assert processes.stop([leader], None, grace_s=0.2) == []
    assert not psutil.pid_exists(process.pid)


def test_a_process_of_another_session_is_found_by_the_mark_in_its_environment(tmp_path: Path, stray: subprocess.Popen[bytes]):
    assert [member.pid for member in processes.members([], tmp_path)] == [stray.pid]
    assert processes.members([], tmp_path / "other") == []


def test_a_session_id_that_now_belongs_to_a_younger_process_is_left_alone(stray: subprocess.Popen[bytes]):
    older = Mark(stray.pid, psutil.Process(stray.pid).create_time() - 3600)
    assert processes.members([older]) == []
    assert processes.stop([older], None, grace_s=0.1) == []
    assert stray.poll() is None


def test_a_mark_does_not_match_a_later_process_with_the_same_id():
    own = processes.mark(os.getpid())
    assert processes.is_alive(own)
    assert not processes.is_alive(Mark(own.pid, own.started_unix - 3600))
