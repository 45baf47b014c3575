"""Memory of pretended GPUs: a file a device and process under the environment's prefix. What a process that ended held is
there for `late_free_s` more, as a driver frees it late."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(sys.prefix)
SETTINGS: dict[str, Any] = json.loads((ROOT / "standin.json").read_text())
GPU_BYTES = int(SETTINGS.get("gpu_bytes", 24 * 2**30))
LATE_FREE_S = float(SETTINGS.get("late_free_s", 0.3))


def _directory(device: int) -> Path:
    directory = ROOT / "gpu" / str(device)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def hold(device: int, size_bytes: int) -> None:
    """This process holds so much. RuntimeError when the device has no room, as CUDA says it."""
    others = sum(size for pid, size in entries(device) if pid != os.getpid())
    if others + size_bytes > GPU_BYTES:
        raise RuntimeError(f"CUDA out of memory on device {device}: {others} bytes in use, {size_bytes} asked, of {GPU_BYTES}")
    path = _directory(device) / str(os.getpid())
    part = path.with_suffix(".part")
    part.write_text(str(size_bytes))
    part.rename(path)


def entries(device: int) -> list[tuple[int, int]]:
    """(pid, bytes) of what is held now."""
    found = []
    for path in _directory(device).iterdir():
        if not path.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            pid, size = int(path.name), int(path.read_text())
            if not _lives(pid):
                ended = path.with_suffix(".ended")
                if not ended.exists():
                    ended.write_text(str(time.time()))
                if time.time() - ended.stat().st_mtime > LATE_FREE_S:
                    path.unlink(missing_ok=True)
                    ended.unlink(missing_ok=True)
                    continue
            found.append((pid, size))
    return found


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False
