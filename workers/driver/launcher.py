"""How the ranks of a pool come to be and go. `LocalRanks` starts processes here, `RayRanks` inside a placement group."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from gateway.api.errors import YardError, invalid
from workers.rank.config import SECRET_VARIABLE, RankConfig, rank_arguments

RANK_MODULE = "workers.rank"


class RankLauncher(Protocol):
    """Addresses of the ranks, by rank: `unix:PATH` or `tcp:HOST:PORT`; they listen when a call returns."""

    async def find(self) -> list[str] | None:
        """Ranks that an earlier driver started and that all still live."""
        ...

    async def start(self) -> list[str]:
        """End what is left of earlier ranks and start new ones. YardError says what is missing."""
        ...

    async def stop(self) -> None:
        """The pool is deleted: end its ranks and give back what holds their place."""
        ...


def starts_alone(device: str) -> bool:
    """Each rank of a cuda pool has a command of its own; those of a cpu pool are one MPI world and start together."""
    return device == "cuda"


def rank_command(config: RankConfig, module: str = RANK_MODULE) -> list[str]:
    """Starts all CPU ranks of a pool (`Connect`/`Accept` between MPI worlds does not work), or the one GPU rank `config.rank`."""
    python = [sys.executable, "-m", module, *rank_arguments(config)]
    if config.ranks == 1 or starts_alone(config.device):
        return [*python, "--rank", str(config.rank)]  # no launcher, and no port where it is alone
    return [_mpiexec(), "-n", str(config.ranks), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *python]


def rank_environment(config: RankConfig, base: Mapping[str, str]) -> dict[str, str]:
    """The secret travels in the environment, which other users cannot read; a command line they can."""
    ranks = config.ranks
    cores = len(os.sched_getaffinity(0))
    threads = str(max(1, cores // ranks))
    return {
        "OMP_NUM_THREADS": threads,
        # A thread that waits by spinning takes the core that the thread of another rank needs: measured with two ranks on two
        # cores, a step of 60 ms took 900. Alone it gains: 308 instead of 201 tokens/s with 8 streams on two cores.
        **({"OMP_WAIT_POLICY": "passive"} if ranks > 1 else {}),
        **base,
        SECRET_VARIABLE: config.secret,
        # Ranks of one node talk through shared memory; nothing of MPI's own needs a TCP port then.
        "OMPI_MCA_btl": base.get("OMPI_MCA_btl", "self,sm"),
    }


def _mpiexec() -> str:
    beside_python = Path(sys.executable).parent / "mpiexec"
    found = str(beside_python) if beside_python.exists() else shutil.which("mpiexec")
    if found is None:
        raise YardError(
            invalid("").code,
            f"no mpiexec beside {sys.executable} or on PATH: a pool of several cpu ranks needs the package `openmpi`",
        )
    return found
