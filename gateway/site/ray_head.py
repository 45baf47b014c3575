"""A Ray head on this machine for one site. Always with a token; on a loopback site all its ports are on 127.0.0.1."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gateway.api.errors import ErrorCode, YardError
from gateway.api.runtime import POOL_MEMORY_RESOURCE
from gateway.site.home import RUN_VARIABLE, Home
from gateway.site.processes import Mark, mark, start_session

_START_TIMEOUT_S = 120.0


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 that nobody holds at this moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()


def environment(home: Home, *, loopback: bool) -> dict[str, str]:
    """What Ray's processes, and a client of this Ray, must have in their environment before they import it."""
    metrics, dashboard_metrics = free_ports(2)
    return {
        RUN_VARIABLE: str(home.run_dir),
        "TMPDIR": str(home.temporary_dir),
        "OMPI_MCA_btl_sm_backing_directory": str(home.shared_memory_dir),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(home.ray_token_file),
        # Ray's default is 15, with which any ordinary process starves the ranks.
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "AUTOSCALER_METRIC_PORT": str(metrics),
        "DASHBOARD_METRIC_PORT": str(dashboard_metrics),
        # Off: Ray takes 127.0.0.1 as the node's address and listens nowhere else.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0" if loopback else "1",
    }


def start(
    home: Home,
    *,
    node_address: str,
    dashboard_port: int,
    pool_mib: int,
    on_start: Callable[[Mark], None],
) -> str:
    """Returns the address of the head. `on_start` gets the session's leader before anything else can fail."""
    session = home.run_dir / "ray"
    shutil.rmtree(session, ignore_errors=True)
    shutil.rmtree(home.head_dir, ignore_errors=True)
    home.head_dir.mkdir(mode=0o700)
    [gcs_port] = free_ports(1)
    log = home.logs_dir / "ray.log"
    loopback = node_address == "127.0.0.1"
    command = [
        sys.executable,
        "-m",
        "gateway.site.ray_start",
        "start",
        "--head",
        "--disable-usage-stats",
        f"--node-ip-address={node_address}",
        f"--port={gcs_port}",
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--dashboard-agent-listen-port=0",
        "--include-dashboard=true",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard_port}",
        # Autoscaling, and the forwarding of logs to a client: neither is used.
        "--no-monitor",
        "--include-log-monitor=false",
        f"--temp-dir={session}",
        f"--resources={json.dumps({POOL_MEMORY_RESOURCE: pool_mib})}",
    ]
    # The head process writes down what it knows, so that the next one goes on where it was killed.
    storage = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(home.head_dir)}
    process = start_session(command, {**os.environ, **environment(home, loopback=loopback), **storage}, log)
    on_start(mark(process.pid))
    try:
        code = process.wait(_START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise YardError(ErrorCode.DEADLINE, f"Ray did not start in {_START_TIMEOUT_S:.0f} s (log: {log})") from None
    if code != 0:
        raise YardError(ErrorCode.INTERNAL, f"Ray did not start: {_reason(log)} (log: {log})")
    return f"{node_address}:{gcs_port}"


def _reason(log: Path) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[A-Za-z.]*(Error|Exception)\b", line)]
    return (errors or lines or ["its log is empty"])[-1]
