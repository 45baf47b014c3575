"""Keeps one server running: `python keeper.py COMMAND…`. Standard library only, so that it costs a few megabytes.

A server that was killed (by an operator, or by the kernel for memory) is started again after a growing pause. One that ended by
itself is not: it said why in its log, and ends this process with its own code. SIGTERM is passed on and ends both.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_HEALTHY_S = 60.0


def keep(command: list[str]) -> int:
    """The code that the server ended with."""
    ending = False
    process: subprocess.Popen[bytes] | None = None

    def end(number: int, frame: object) -> None:
        nonlocal ending
        ending = True
        if process is not None and process.poll() is None:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    pause_s = _FIRST_PAUSE_S
    while not ending:
        began_s = time.monotonic()
        process = subprocess.Popen(command)
        code = process.wait()
        if code >= 0 or ending:
            return max(code, 0)
        if time.monotonic() - began_s > _HEALTHY_S:
            pause_s = _FIRST_PAUSE_S
        print(f"keeper: {command[0]} was ended by signal {-code}; starting it again in {pause_s:.1f} s", flush=True)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return 0


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
