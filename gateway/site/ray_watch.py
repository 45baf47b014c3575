"""Ends a command that waits inside Ray's client for a Ray that has ended; Ray itself would do so a minute later, without a word.

A command's own loops look as well, and end it in the normal way. This is for calls that nothing can interrupt, in a client that
takes its process with it when its node goes: the process goes on as `python -m gateway.site.ray_watch`, which has no client.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from gateway.api.errors import YardError
from gateway.site import down, ray_health, state
from gateway.site.board import Board
from gateway.site.home import Home

_PATIENCE_S = 6.0
"""How long the command may take to notice by itself."""


@contextmanager
def watched(home: Home, board: Board, look: Callable[[], None]) -> Iterator[None]:
    """`look` raises a YardError once Ray has ended."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(ray_health.LOOK_S):
            try:
                look()
            except YardError as error:
                if not is_over.wait(_PATIENCE_S):
                    board.__exit__()  # gives the terminal back
                    become_cleaner(home, error.message)
                return

    threading.Thread(target=watch, name="ray-watch", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def become_cleaner(home: Home, message: str) -> NoReturn:
    """The process keeps its id, so that whoever waits for it gets its code, and the state file still names it as at work."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, "-m", __name__, str(home.path), message])


def main(path: str, message: str) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # half of a site must not be left behind
    home = Home(Path(path))
    found = state.load(home)
    if found is not None and found.phase == "starting" and found.owner.pid == os.getpid():
        down.stop_processes(home, found)
    print(f"yard: {message}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
