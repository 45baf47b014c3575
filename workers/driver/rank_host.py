"""The Ray actor that stands for one rank and holds the rank's bundle.

The actors are detached, so that ranks outlive their driver. The one of bundle 0 starts the ranks of a cpu pool, which are one
MPI world; those of a cuda pool are each started by their own, which sees the GPU that Ray gave its bundle. A rank ends with its
actor at once; an actor whose rank has ended waits for the driver to start the ranks again, and gives its place back when none
does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from gateway.api.errors import unavailable
from workers.driver.engine_processes import EngineProcesses
from workers.driver.launcher import rank_command
from workers.driver.local_ranks import end_leftovers, fresh_meeting_place, start_environment, tail
from workers.rank.config import RankConfig, endpoint_path, pid_path, socket_path

NAMESPACE = "modelyard"
_POLL_S = 0.2


def group_name(pool: str) -> str:
    return f"modelyard-pool-{pool}"


def host_name(pool: str, rank: int) -> str:
    return f"modelyard-rank-{pool}-{rank}"


@dataclass(frozen=True)
class HostDescription:
    pid: int
    node_id: str
    node_name: str
    node_ip: str
    gpu_ids: tuple[str, ...] = ()
    free_bytes: int = 0  # of the node's memory


class RankHost:
    """Calls are short; watching has a thread of its own."""

    def __init__(self, pool: str, rank: int, directory: str) -> None:
        self._pool = pool
        self._rank = rank
        self._directory = Path(directory)
        self._process: subprocess.Popen[bytes] | None = None
        self._watched = 0  # process id of its rank
        self._engines = EngineProcesses(self._directory)
        self._attended_at = 0.0

    def describe(self) -> HostDescription:
        own = ray.get_runtime_context().get_node_id()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        hostname = os.uname().nodename
        alone = sum(node["NodeManagerHostname"] == hostname for node in nodes) == 1
        return HostDescription(
            pid=os.getpid(),
            node_id=own,
            # Several Ray nodes of one machine are told apart.
            node_name=hostname if alone else f"{hostname}/{own[:8]}",
            node_ip=ray.util.get_node_ip_address(),
            free_bytes=psutil.virtual_memory().available,
            gpu_ids=tuple(str(gpu) for gpu in ray.get_gpu_ids()),
        )

    def engine(self, method: str, *arguments: object) -> Any:
        """A call of `EngineProcesses`: servers of models whose first rank is this bundle's."""
        return getattr(self._engines, method)(*arguments)

    def attend(self, grace_s: float) -> None:
        """A driver is there. Where no rank ends this actor, it ends itself when none has been for the grace."""
        first = self._attended_at == 0.0
        self._attended_at = time.monotonic()
        if first:
            threading.Thread(target=self._outlive_driver, args=(grace_s,), name="driver", daemon=True).start()

    def addresses(self) -> tuple[str, str]:
        """(for drivers on this node, for drivers elsewhere); the second is empty when the rank listens here only."""
        endpoint = endpoint_path(self._directory, self._rank)
        return f"unix:{socket_path(self._directory, self._rank)}", f"tcp:{endpoint.read_text()}" if endpoint.exists() else ""

    def clear(self, ranks: Sequence[int]) -> None:
        """End what is left of these ranks, all of this node."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        end_leftovers(self._directory, ranks)

    def meeting_place(self, one_node: bool) -> str:
        """On bundle 0: where the ranks of a cuda pool meet next. Over several nodes a port that is free now."""
        if one_node:
            return f"file:{fresh_meeting_place(self._directory)}"
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"tcp:{address}:{probe.getsockname()[1]}"

    def launch(self, config: RankConfig, module: str) -> None:
        """Start `rank_command`: all ranks, on bundle 0 of a cpu pool, or this bundle's."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                rank_command(config, module),
                env=start_environment(config),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        threading.Thread(target=self._outlive, args=(self._process, config.grace_s), name="ranks", daemon=True).start()

    def listens(self, ranks: Sequence[int]) -> bool:
        """Where they were started: these ranks have begun to listen. YardError with the end of the log when they have ended."""
        if self._process is not None and self._process.poll() is not None:
            code = self._process.returncode
            raise unavailable(f"the ranks of pool `{self._pool}` ended with code {code}; {self._log} ends:\n{tail(self._log)}")
        return all(pid_path(self._directory, rank).exists() for rank in ranks)

    def watch(self, grace_s: float) -> None:
        """On bundles that started no rank: end this actor after its rank, unless ranks are started again within the grace."""
        self._watched = int(pid_path(self._directory, self._rank).read_text())
        threading.Thread(target=self._outlive_rank, args=(self._watched, grace_s), name="rank", daemon=True).start()

    @property
    def _log(self) -> Path:
        return self._directory / "ranks.log"

    def _outlive(self, process: subprocess.Popen[bytes], grace_s: float) -> None:
        process.wait()
        time.sleep(grace_s)
        if self._process is not process:
            return
        if self._rank == 0:
            ray.util.remove_placement_group(ray.util.get_placement_group(group_name(self._pool)))
        os._exit(0)

    def _outlive_driver(self, grace_s: float) -> None:
        while time.monotonic() - self._attended_at < grace_s:
            time.sleep(_POLL_S)
        for name in self._engines.names():
            self._engines.end(name)
        if self._rank == 0:
            ray.util.remove_placement_group(ray.util.get_placement_group(group_name(self._pool)))
        os._exit(0)

    def _outlive_rank(self, pid: int, grace_s: float) -> None:
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(_POLL_S)
        time.sleep(grace_s)
        if self._watched == pid:
            os._exit(0)
