"""What a rank process is started with."""

from __future__ import annotations

import argparse
import hashlib
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NONCE_BYTES = 32  # of text, sent by a rank before anything else
SECRET_VARIABLE = "MODELYARD_RANK_SECRET"
MPI_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


@dataclass(frozen=True)
class RankConfig:
    pool: str
    rank: int
    device: str  # cpu or cuda
    capacity_bytes: int  # 0 on cuda: what the card has, less a reserve
    directory: Path  # of sockets and pid files, on this rank's node
    cache_dir: Path
    grace_s: float  # without a driver for so long: free everything and exit
    secret: str
    host_pids: tuple[int, ...] = ()  # by rank; a rank exits when its host does
    node: str = ""  # how people call the machine; default: its host name
    listen_host: str = ""  # also listen there over TCP, for a driver on another machine
    ranks: int = 1  # of the pool
    standby_bytes: int = 0  # of host memory, for parked models: so much at least
    rendezvous: str = ""  # where the ranks of a cuda pool meet: file:PATH, or tcp:HOST:PORT at rank 0

    @property
    def socket(self) -> Path:
        return socket_path(self.directory, self.rank)

    def __repr__(self) -> str:
        return f"RankConfig(pool={self.pool!r}, rank={self.rank}, directory={str(self.directory)!r})"


def socket_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.sock"


def pid_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.pid"


def endpoint_path(directory: Path, rank: int) -> Path:
    """Holds host:port of a rank that listens over TCP too."""
    return directory / f"rank-{rank}.endpoint"


def proof(secret: str, nonce: str) -> str:
    """What a driver answers to a rank's nonce: the secret itself never travels."""
    return hmac.new(secret.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def rank_arguments(config: RankConfig) -> list[str]:
    """Command line of `python -m workers.rank` for this configuration, without the secret and (under mpiexec) the rank."""
    return [
        *("--pool", config.pool),
        *("--device", config.device),
        *("--capacity-bytes", str(config.capacity_bytes)),
        *("--directory", str(config.directory)),
        *("--cache-dir", str(config.cache_dir)),
        *("--grace-s", str(config.grace_s)),
        *("--host-pids", ",".join(map(str, config.host_pids))),
        *("--node", config.node),
        *("--listen-host", config.listen_host),
        *("--ranks", str(config.ranks)),
        *("--standby-bytes", str(config.standby_bytes)),
        *("--rendezvous", config.rendezvous),
    ]


def parse(arguments: Sequence[str] | None = None) -> RankConfig:
    """From the command line and the environment. SystemExit with a usage line when something is missing."""
    parser = argparse.ArgumentParser(prog="python -m workers.rank", description="One rank of a Modelyard pool.")
    parser.add_argument("--pool", required=True)
    parser.add_argument("--rank", type=int, default=_mpi_rank(), help="default: the MPI rank of this process, else 0")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--capacity-bytes", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--grace-s", type=float, default=60.0)
    parser.add_argument("--host-pids", default="", help="process ids by rank, separated by commas")
    parser.add_argument("--node", default="")
    parser.add_argument("--listen-host", default="", help="also listen there over TCP, on a free port")
    parser.add_argument("--ranks", type=int, default=1, help="how many ranks the pool has")
    parser.add_argument("--standby-bytes", type=int, default=0, help="host memory that parked models may take at least")
    parser.add_argument("--rendezvous", default="", help="file:PATH or tcp:HOST:PORT, where the ranks of a cuda pool meet")
    options = parser.parse_args(arguments)
    secret = os.environ.pop(SECRET_VARIABLE, "")
    if not secret:
        parser.error(f"{SECRET_VARIABLE} is not set; ranks are started by a pool driver")
    return RankConfig(
        pool=options.pool,
        rank=options.rank,
        device=options.device,
        capacity_bytes=options.capacity_bytes,
        directory=options.directory,
        cache_dir=options.cache_dir,
        grace_s=options.grace_s,
        secret=secret,
        host_pids=tuple(int(pid) for pid in options.host_pids.split(",") if pid),
        node=options.node or os.uname().nodename,
        listen_host=options.listen_host,
        ranks=options.ranks,
        standby_bytes=options.standby_bytes,
        rendezvous=options.rendezvous,
    )


def _mpi_rank() -> int:
    for variable in MPI_RANK_VARIABLES:
        if variable in os.environ:
            return int(os.environ[variable])
    return 0
