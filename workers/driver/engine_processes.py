"""The server processes of one node: started in sessions of their own so that they outlive a driver, found again by their files.

Blocking and small. Runs in the driver, or in the Ray actor that holds the bundle of a group's first rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from gateway.api.errors import unavailable
from workers.driver.local_ranks import tail

CONFIG = "{config}"
"""In a command: the file with the server's configuration."""

RUN_TIMEOUT_S = 900.0
END_TIMEOUT_S = 20.0


class EngineProcesses:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], config: Mapping[str, Any]) -> None:
        """Its socket, `NAME.sock`, may be connected a moment later."""
        self.end(name)
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._path(name, "json")
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({**config, "socket": str(self.socket(name)), "endpoint": str(self._path(name, "endpoint"))}, file)
        words = [str(path) if word == CONFIG else word for word in command]
        with self._path(name, "log").open("ab") as log:
            child = subprocess.Popen(
                words, env=dict(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._children[name] = child
        self._path(name, "pid").write_text(f"{child.pid} {psutil.Process(child.pid).create_time()}")

    def names(self) -> list[str]:
        """Of the servers that live, also an earlier driver's."""
        return sorted(path.stem for path in self._directory.glob("e*.pid") if self.exit_code(path.stem) is None)

    def socket(self, name: str) -> Path:
        return self._path(name, "sock")

    def endpoint(self, name: str) -> str:
        """host:port where it listens over TCP too, for a driver on another node; else empty."""
        path = self._path(name, "endpoint")
        return path.read_text() if path.exists() else ""

    def exit_code(self, name: str) -> int | None:
        """None while it lives. -1 when it was somebody else's child."""
        child = self._children.get(name)
        if child is not None:
            return child.poll()
        return None if self._process(name) is not None else -1

    def log_tail(self, name: str) -> str:
        return tail(self._path(name, "log"))

    def end(self, name: str, pids: Sequence[int] = (), since: float = 0.0) -> None:
        """Kill what is left of it: its session, and those of `pids` (its ranks) that began after `since`."""
        process = self._process(name)
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                rank = psutil.Process(pid)
                if rank.create_time() >= since > 0:
                    rank.kill()
        child = self._children.pop(name, None)
        if child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_TIMEOUT_S)
        for kind in ("pid", "sock", "endpoint", "json"):
            self._path(name, kind).unlink(missing_ok=True)

    def wait(self, name: str, timeout_s: float) -> bool:
        """Whether it ended by itself in time."""
        end = time.monotonic() + timeout_s
        while self.exit_code(name) is None:
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    @staticmethod
    def run(command: Sequence[str], environment: Mapping[str, str], timeout_s: float = RUN_TIMEOUT_S) -> str:
        """What a short command prints. YardError with its last words."""
        try:
            done = subprocess.run(
                list(command), env=dict(environment), capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise unavailable(f"{command[0]}: {error}") from error
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
            raise unavailable(f"{' '.join(command[:3])} ended with code {done.returncode}: {lines[-1]}")
        return done.stdout

    def _process(self, name: str) -> psutil.Process | None:
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            pid, created = self._path(name, "pid").read_text().split()
            process = psutil.Process(int(pid))
            if process.create_time() == float(created) and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def _path(self, name: str, kind: str) -> Path:
        return self._directory / f"{name}.{kind}"
