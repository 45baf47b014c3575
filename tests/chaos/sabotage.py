"""What breaks around a process while it lives: its connections, its memory, the disk that it writes to."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

_PIDFD_GETFD = 438  # not in the standard library; the number is the same on x86-64 and ARM
_BLOCK = b"\0" * 2**20


def cut_connections(pid: int, port: int) -> int:
    """Shuts down what a process has open towards a port, as a network does that drops it; both ends live on. How many."""
    own = [link for link in psutil.Process(pid).net_connections("tcp") if link.raddr and link.raddr.port == port]
    process = os.pidfd_open(pid)
    try:
        for link in own:
            copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, link.fd, 0)
            if copy < 0:
                raise OSError(ctypes.get_errno(), f"pidfd_getfd of {pid}")
            with socket.socket(fileno=copy) as connection:
                connection.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(process)
    return len(own)


def fill(file: Path) -> None:
    """Writes until the file system has no byte left."""
    with file.open("wb", buffering=0) as ballast:
        for block in (_BLOCK, b"\0"):
            try:
                while ballast.write(block) == len(block):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


@contextlib.contextmanager
def without_memory(pid: int) -> Iterator[None]:
    """The process can map nothing more."""
    process = psutil.Process(pid)
    soft, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (process.memory_info().vms, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_AS, (soft, hard))
