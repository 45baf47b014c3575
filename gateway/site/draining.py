"""`python -m gateway.site.draining`: takes the applications of the site in this home off its Ray, once their requests have ended.

A process of its own, because Ray's client may not be importable, may wait for ever for a node that hangs, and takes its
process with it when its node goes; whoever stops a site must survive all that.
"""

from __future__ import annotations

import os
import subprocess
import sys

from gateway.api.errors import YardError
from gateway.site import ray_head, state
from gateway.site.home import HOME_VARIABLE, Home

TIMEOUT_S = 120.0
"""Serve gives gateways and pools 30 s each for their requests."""
_COMMAND = (sys.executable, "-m", __name__)


def drain(home: Home, timeout_s: float = TIMEOUT_S) -> str:
    """Empty, or why not all could be drained."""
    environment = {**os.environ, HOME_VARIABLE: str(home.path)}
    try:
        done = subprocess.run(
            _COMMAND,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {timeout_s:.0f} s"
    except OSError as error:
        return f"cannot start a process for it: {error.strerror}"
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    return (lines or [f"it ended with {done.returncode}"])[-1][:400]


def main() -> None:
    home = Home.from_environment()
    found = state.load(home)
    if found is None:
        return
    try:
        _undeploy(home, found)
    except YardError as error:
        print(error.message)
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - the other process says it, and goes on
        print(f"{type(error).__name__}: {' '.join(str(error).split())}")
        sys.exit(1)


def _undeploy(home: Home, found: state.SiteState) -> None:
    from gateway.site import deployment

    loopback = found.ray_address.startswith("127.0.0.1:")
    deployment.load(ray_head.environment(home, loopback=loopback) if found.ray_is_ours else {})
    try:
        deployment.connect(found.ray_address)
    except YardError:
        if not found.ray_is_ours:
            raise
        return  # a head that does not answer has nothing to drain; its processes are ended next
    deployment.undeploy(whole_serve=found.ray_is_ours)
    deployment.disconnect()


if __name__ == "__main__":
    main()
