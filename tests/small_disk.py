"""A file system of its own for what a test fills."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

MEBIBYTES = 1280  # `yard up` wants a GiB free


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[bool]:
    """`directory` is one of so many; False, and nothing is mounted, where that is not allowed."""
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", f"size={MEBIBYTES}m,mode=700", "none", str(directory)]
    mounted = mount is not None and subprocess.run([mount, *options], capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)
