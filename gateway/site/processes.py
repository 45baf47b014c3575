"""Finds and ends exactly the processes that a site started.

Each server of a site leads a session of its own. The kernel keeps a session id from being used again while one of its
members lives, and Ray's workers stay in it, also when their parent died or they renamed themselves. Processes that left
the session are found by the mark in their environment.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from gateway.site import keeper
from gateway.site.home import RUN_VARIABLE

KEPT = "keeper of "
_START_TOLERANCE_S = 1.0


class Mark(msgspec.Struct, frozen=True):
    """A process that cannot be mistaken for a later one with the same id."""

    pid: int
    started_unix: float


def mark(pid: int) -> Mark:
    """psutil.NoSuchProcess when it is gone."""
    return Mark(pid, psutil.Process(pid).create_time())


def is_alive(wanted: Mark) -> bool:
    try:
        process = psutil.Process(wanted.pid)
        return abs(process.create_time() - wanted.started_unix) < _START_TOLERANCE_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_session(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts the leader of a session of its own, with its output in `log`. A terminal's Ctrl-C does not reach it."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def members(leaders: Collection[Mark], run_dir: Path | None = None) -> list[psutil.Process]:
    """Living processes of the sessions, their children, and those whose environment carries the site's mark."""
    sessions = {leader.pid: leader for leader in leaders if not _is_taken_over(leader)}
    found: dict[int, psutil.Process] = {}
    for process in _own_processes():
        try:
            leader = sessions.get(os.getsid(process.pid))
            inside = leader is not None and process.create_time() >= leader.started_unix - _START_TOLERANCE_S
            if inside or (run_dir is not None and process.environ().get(RUN_VARIABLE) == str(run_dir)):
                found[process.pid] = process
                for child in process.children(recursive=True):
                    found.setdefault(child.pid, child)
        except (psutil.Error, OSError):
            continue  # it ended while we looked, or is not ours to look into
    found.pop(os.getpid(), None)
    return [process for process in found.values() if not _is_zombie(process)]


def server_names(leader: Mark) -> set[str]:
    """Names of the session's processes, and of the servers that keepers among them start again."""
    names: set[str] = set()
    if _is_taken_over(leader):
        return names
    for process in _own_processes():
        try:
            if os.getsid(process.pid) != leader.pid or _is_zombie(process):
                continue
            name, command = process.name(), process.cmdline()
        except (psutil.Error, OSError):
            continue  # it ended while we looked
        names.add(name)
        if keeper.__file__ in command[:-1]:
            names.add(KEPT + Path(command[command.index(keeper.__file__) + 1]).name)
    return names


def stop(
    leaders: Collection[Mark], run_dir: Path | None, grace_s: float, first: str = "", first_grace_s: float = 0.0
) -> list[psutil.Process]:
    """Asks every member to end, and kills after `grace_s`. Returns those that are still there, normally none.

    Members named `first` are asked before the others, which they may need for their own end.
    """
    found = members(leaders, run_dir)
    leading = [process for process in found if process_name(process) == first]
    for group, wait_s in ((leading, first_grace_s), (found, grace_s)):
        for process in group:
            _signal(process, terminate=True)
        psutil.wait_procs(group, timeout=wait_s)
    for _ in range(3):
        left = members(leaders, run_dir)
        if not left:
            return []
        for process in left:
            _signal(process, terminate=False)
        psutil.wait_procs(left, timeout=2.0)
    return members(leaders, run_dir)


def _is_taken_over(leader: Mark) -> bool:
    """True when the leader's id now belongs to a younger process, so that its session is somebody else's."""
    try:
        return abs(psutil.Process(leader.pid).create_time() - leader.started_unix) >= _START_TOLERANCE_S
    except psutil.NoSuchProcess:
        return False


def _own_processes() -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid():
                yield process
        except psutil.Error:
            continue


def process_name(process: psutil.Process) -> str:
    """Empty when it is gone."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _signal(process: psutil.Process, *, terminate: bool) -> None:
    try:
        process.terminate() if terminate else process.kill()
    except psutil.NoSuchProcess:
        return
