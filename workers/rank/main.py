"""Start of a rank process: arena, engines by name, communication by device, then serve until the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING

from gateway.api.errors import ErrorCode, YardError
from workers.comm.base import GroupComm
from workers.engines.base import Engine
from workers.memory.arena import HostArena
from workers.rank.compute import EngineFactory, GroupCommFactory
from workers.rank.config import RankConfig, parse
from workers.rank.server import RankServer

if TYPE_CHECKING:
    from workers.rank.device import DeviceRank


def run(config: RankConfig, make_comm: GroupCommFactory, make_engine: EngineFactory) -> int:
    """Serve until the process must end; its exit code."""
    # Importing an engine takes seconds: it is there when the first load arrives. A failure shows again, with its reason, there.
    threading.Thread(target=_import_quietly, args=(make_engine,), name="import", daemon=True).start()
    return _serve(RankServer(config, HostArena(config.capacity_bytes), make_comm, make_engine, join_world))


def run_on_gpu(config: RankConfig) -> int:
    """As `run`. YardError without a GPU."""
    from workers.rank.gpu import GpuRank  # imports torch, which ranks of a cpu pool import beside their start

    return run_on_device(config, GpuRank(config))


def run_on_device(config: RankConfig, rank: DeviceRank) -> int:
    """As `run`, with one process a device that meets its peers at `config.rendezvous`."""
    server = RankServer(
        config, rank.arena, rank.make_comm, rank.make_engine, rank.prepare, rank.memory, rank.load_probe, rank.facts
    )
    return _serve(server)


def _serve(server: RankServer) -> int:
    code = asyncio.run(server.serve())
    if code == 0:
        server.close()
    return code


def _import_quietly(make_engine: EngineFactory) -> None:
    with contextlib.suppress(YardError, ImportError):
        make_engine("torch")


def join_world() -> None:
    """Under mpiexec: initialise MPI at the start. It waits for all ranks of the pool, also those that a group leaves out."""
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        import workers.comm.mpi  # noqa: F401, I001 - sets the thread level before MPI is imported
        from mpi4py import MPI  # noqa: F401


def mpi_comm(ranks: tuple[int, ...], tensor_parallel: int, pipeline_parallel: int, number: int) -> GroupComm:
    from workers.comm.mpi import make_group_comm

    return make_group_comm(ranks, tensor_parallel, pipeline_parallel, number)


def engine_of(config: RankConfig) -> EngineFactory:
    def make(name: str) -> Engine:
        if name == "torch":
            from workers.engines.torch.engine import TorchEngine

            return TorchEngine(config.cache_dir)
        raise YardError(ErrorCode.INVALID, f"engine {name!r} does not run in a rank of a {config.device} pool; use engine: torch")

    return make


def end_process(code: int) -> None:
    """Without the exit handlers: MPI's wait for peers that may be gone, and threads may hold a lock that never opens."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s rank %(process)d %(name)s: %(message)s")
    config = parse()
    end_process(run_on_gpu(config) if config.device == "cuda" else run(config, mpi_comm, engine_of(config)))
