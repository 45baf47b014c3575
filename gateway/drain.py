"""`python -m gateway.drain SECONDS`: what a pod does before it is ended. Gateways of this node say that they are not ready, and
this waits until their requests have ended, or the seconds are over."""

from __future__ import annotations

import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

RUN_VARIABLE = "MODELYARD_RUN"
SETTLE_S = 5.0
"""Load balancers ask for readiness every second or two, so requests may come for so long after it was withdrawn."""
_METRIC = "modelyard_requests_in_flight{"


def asked(run_dir: Path) -> bool:
    return _file(run_dir).exists()


def drain(run_dir: Path, url: str, limit_s: float, settle_s: float = SETTLE_S) -> bool:
    """Whether all requests ended in time."""
    _file(run_dir).parent.mkdir(parents=True, exist_ok=True)
    _file(run_dir).touch()
    give_up = time.monotonic() + limit_s
    time.sleep(min(settle_s, limit_s))
    while time.monotonic() < give_up:
        if in_flight(url) == 0:
            return True
        time.sleep(0.5)
    return False


def in_flight(url: str) -> int:
    """Over all gateways of the node; 0 when none answers, for then there is nothing to wait for."""
    try:
        with urllib.request.urlopen(url, timeout=5.0, context=_own() if url.startswith("https:") else None) as answer:
            lines = answer.read().decode().splitlines()
    except (urllib.error.URLError, OSError):
        return 0
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(_METRIC))


def _own() -> ssl.SSLContext:
    """For the gateway beside us, by its address: its certificate names something else, and is the one to show if it asks."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(os.environ["MODELYARD_TLS_CERT"], os.environ["MODELYARD_TLS_KEY"])
    return context


def _file(run_dir: Path) -> Path:
    return run_dir / "draining"


def main() -> int:
    port = os.environ.get("MODELYARD_HTTP_PORT", "8000")
    scheme = "https" if os.environ.get("MODELYARD_TLS_CERT") else "http"
    host = os.environ.get("MODELYARD_POD_IP", "127.0.0.1")
    run_dir = Path(os.environ.get(RUN_VARIABLE, "/tmp/modelyard"))
    done = drain(run_dir, f"{scheme}://{host}:{port}/metrics", float(sys.argv[1]) if len(sys.argv) > 1 else 300.0)
    return 0 if done else 1


if __name__ == "__main__":
    raise SystemExit(main())
