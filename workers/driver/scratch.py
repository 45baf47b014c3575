"""Where MPI keeps what the ranks of one pool share, in directories of its own: processes that are killed leave it behind."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path


def make_scratch(directory: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Makes them anew for the ranks of the pool with this directory, and returns the environment that names them."""
    clear_scratch(directory, base)
    for scratch in _scratch(directory, base):
        scratch.mkdir(parents=True, mode=0o700)
    temporary, segments = _scratch(directory, base)
    return {"TMPDIR": str(temporary), "OMPI_MCA_btl_sm_backing_directory": str(segments)}


def clear_scratch(directory: Path, base: Mapping[str, str]) -> None:
    for scratch in _scratch(directory, base):
        shutil.rmtree(scratch, ignore_errors=True)


def _scratch(directory: Path, base: Mapping[str, str]) -> tuple[Path, Path]:
    """(temporary files, segments in shared memory)."""
    shared = Path(base.get("OMPI_MCA_btl_sm_backing_directory", f"/dev/shm/yard-{os.getuid()}"))
    return directory / "tmp", shared / hashlib.sha256(str(directory).encode()).hexdigest()[:8]
