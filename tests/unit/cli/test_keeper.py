"""The keeper starts again what was killed, and leaves ended what ended by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gateway.site import keeper

SERVER = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(60)"


def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-I", keeper.__file__, sys.executable, "-c", code, *arguments])


def pids(file: Path, count: int) -> list[int]:
    end = time.monotonic() + 20
    while True:
        found = file.read_text().split() if file.exists() else []
        if len(found) >= count:
            return [int(pid) for pid in found]
        assert time.monotonic() < end, f"{len(found)} starts, not {count}"
        time.sleep(0.02)


def test_a_killed_server_is_started_again_and_ends_with_its_keeper(tmp_path: Path) -> None:
    keeping = start(SERVER, str(tmp_path / "pids"))
    try:
        (first,) = pids(tmp_path / "pids", 1)
        os.kill(first, signal.SIGKILL)
        second = pids(tmp_path / "pids", 2)[1]
        keeping.terminate()
        assert keeping.wait(10) == 0
        assert not psutil.pid_exists(second)
    finally:
        keeping.kill()


@pytest.mark.parametrize("code", [0, 1, 3])
def test_a_server_that_ended_by_itself_ends_its_keeper_with_its_code(code: int) -> None:
    assert start(f"raise SystemExit({code})").wait(10) == code
