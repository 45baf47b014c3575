"""The ranks of one model, wherever they run: in this process, spawned by MPI, launched by mpiexec, or as Ray actors."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any, Protocol

from tensorrt_llm._standin.rank import Rank, serve

ADDRESS_VARIABLE = "TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"


class Ranks(Protocol):
    def call(self, method: str, *arguments: Any) -> list[Any]: ...

    def close(self) -> None: ...


class OneRank:
    def __init__(self) -> None:
        self._rank = Rank(0)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(self._rank, method)(*arguments)]

    def close(self) -> None:
        self._rank.end()


class ConnectedRanks:
    """`start` is called with an address and a key; the ranks connect to it."""

    def __init__(self, world: int, start: Any) -> None:
        from multiprocessing.connection import Listener

        key = secrets.token_bytes(16)
        address = str(Path(tempfile.mkdtemp(prefix="trtllm-")) / "ranks")
        self._connections: dict[int, Any] = {}
        with Listener(address, authkey=key, backlog=world) as listener:
            start(address, key)
            for _ in range(world):
                connection = listener.accept()
                self._connections[int(connection.recv_bytes())] = connection

    def call(self, method: str, *arguments: Any) -> list[Any]:
        body = json.dumps([method, arguments]).encode()
        for connection in self._connections.values():
            connection.send_bytes(body)
        answers = [json.loads(self._connections[rank].recv_bytes()) for rank in sorted(self._connections)]
        for answer in answers:
            if "error" in answer:
                raise RuntimeError(answer["error"])
        return [answer["value"] for answer in answers]

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


class RayActors:
    def __init__(self, placement: Any, world: int) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        [group], [bundles] = placement.placement_groups, placement.placement_bundle_indices
        if len(bundles) != world:
            raise ValueError("the bundle indices must be as many as the world size")
        self._ray = ray
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._actors = [
            ray.remote(Rank)
            .options(
                num_gpus=placement.per_worker_gpu_share or 1.0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
                runtime_env={"env_vars": environment},
            )
            .remote(rank)
            for rank, bundle in enumerate(bundles)
        ]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self._ray.get([getattr(actor, method).remote(*arguments) for actor in self._actors], timeout=60)

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)


def launched(world: int) -> ConnectedRanks:
    """Around this process there is an mpiexec; its ranks wait for an address to connect to."""

    def start(address: str, key: bytes) -> None:
        path = Path(os.environ[ADDRESS_VARIABLE])
        part = path.with_suffix(".part")
        part.write_text(json.dumps([address, key.hex()]))
        part.rename(path)

    return ConnectedRanks(world, start)


def spawned(session: Any) -> ConnectedRanks:
    return ConnectedRanks(session.n_workers, lambda address, key: session.submit(serve, address, key))
