"""An interpreter of its own with the stand-in of TensorRT-LLM in it, as a site names it in `engines.trtllm.python`."""

from __future__ import annotations

import json
import site
import sys
import venv
from pathlib import Path

STANDIN = Path(__file__).parent / "trtllm_standin"


def make_environment(directory: Path, version: str = "1.4.0rc1", **settings: object) -> Path:
    """Its interpreter. `settings` are the stand-in's: load_s, late_free_s, gpu_bytes, dropped and so on."""
    venv.create(directory, with_pip=False, symlinks=True)
    [packages] = directory.glob("lib/python*/site-packages")
    # Behind the stand-in: mpi4py, Ray and pydantic, of which TensorRT-LLM's environment has its own.
    (packages / "standin.pth").write_text("\n".join([str(STANDIN), *site.getsitepackages()]))
    (directory / "standin.json").write_text(json.dumps({"version": version, **settings}))
    python = directory / "bin" / "python"
    for script in (STANDIN / "bin").iterdir():
        command = directory / "bin" / script.name
        command.write_text(f"#!{python}\n{script.read_text()}")
        command.chmod(0o755)
    for command in ("mpiexec", "prte"):  # they find their parts beside themselves
        wrapper = directory / "bin" / command
        wrapper.write_text(f'#!/bin/sh\nexec {sys.prefix}/bin/{command} "$@"\n')
        wrapper.chmod(0o755)
    return python


def mpi_variables(launch: str) -> dict[str, str]:
    """For `engines.trtllm.environment`: the tests' own Open MPI. It spawns over TCP only."""
    return {
        "MPI4PY_LIBMPI": f"{sys.prefix}/lib/libmpi.so.40",
        "OMPI_MCA_btl": "self,sm" if launch == "mpiexec" else "tcp,self",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
