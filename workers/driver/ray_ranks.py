"""Ranks inside a detached placement group, one bundle a device, so that Ray knows what a pool holds and shows it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gateway.api.config import PoolSpec
from gateway.api.errors import unavailable
from workers.driver.local_ranks import START_TIMEOUT_S, listens
from workers.driver.rank_host import NAMESPACE, RankHost, group_name, host_name
from workers.rank.config import RankConfig, pid_path, socket_path

log = logging.getLogger(__name__)
_T = TypeVar("_T")

POOL_RESOURCE = "modelyard_pool_mib"
PLACEMENT_TIMEOUT_S = 30.0
ACTOR_TIMEOUT_S = 30.0
_ACTOR_GONE = (RayActorError, RayTaskError, GetTimeoutError)


class RayRanks:
    """Blocking calls of Ray run on a thread; one at a time."""

    def __init__(self, config: RankConfig, spec: PoolSpec) -> None:
        self._config = config
        self._spec = spec
        self._ranks = spec.devices

    async def find(self) -> list[Path] | None:
        sockets = await asyncio.to_thread(self._find)
        if sockets is None:
            return None
        return sockets if all([await listens(socket) for socket in sockets]) else None

    async def start(self) -> list[Path]:
        first = await asyncio.to_thread(self._start)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not all([await listens(socket) for socket in self._sockets]):
            await asyncio.sleep(0.05)
            await asyncio.to_thread(_reach, lambda: ray.get(first.check.remote(), timeout=ACTOR_TIMEOUT_S))
            if time.monotonic() > deadline:
                raise unavailable(f"the ranks of pool `{self._config.pool}` do not listen after {START_TIMEOUT_S:.0f} s")
        await asyncio.to_thread(self._watch_ranks)
        return self._sockets

    async def stop(self) -> None:
        await asyncio.to_thread(self._stop)

    @property
    def _sockets(self) -> list[Path]:
        return [socket_path(self._config.directory, rank) for rank in range(self._ranks)]

    # ------------------------------------------------------------------ on a thread

    def _find(self) -> list[Path] | None:
        hosts = self._hosts()
        if any(host is None for host in hosts) or _placement_group(self._config.pool) is None:
            return None
        try:
            ray.get([host.describe.remote() for host in hosts if host is not None], timeout=ACTOR_TIMEOUT_S)
        except _ACTOR_GONE:
            return None
        return self._sockets

    def _start(self) -> Any:
        """The actor of bundle 0, which has begun to start the ranks."""
        self._kill_hosts()
        group = self._place()
        actor: Any = ray.remote(RankHost)
        bundle = self._bundle()
        hosts: list[Any] = [
            actor.options(
                name=host_name(self._config.pool, rank),
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=0,
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                resources={POOL_RESOURCE: bundle[POOL_RESOURCE]},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            ).remote(self._config.pool, rank)
            for rank in range(self._ranks)
        ]
        described = _reach(lambda: ray.get([host.describe.remote() for host in hosts], timeout=ACTOR_TIMEOUT_S))
        config = replace(self._config, host_pids=tuple(int(one["pid"]) for one in described))
        _reach(lambda: ray.get(hosts[0].launch.remote(config, self._ranks), timeout=ACTOR_TIMEOUT_S))
        return hosts[0]

    def _watch_ranks(self) -> None:
        for rank, host in enumerate(self._hosts()):
            if host is not None and rank > 0:
                host.watch.remote(int(pid_path(self._config.directory, rank).read_text()))

    def _stop(self) -> None:
        self._kill_hosts()
        group = _placement_group(self._config.pool)
        if group is not None:
            ray.util.remove_placement_group(group)

    def _kill_hosts(self) -> None:
        """Each rank ends with its actor."""
        for host in self._hosts():
            if host is not None:
                ray.kill(host, no_restart=True)
        deadline = time.monotonic() + ACTOR_TIMEOUT_S
        while any(host is not None for host in self._hosts()) and time.monotonic() < deadline:
            time.sleep(0.05)  # the names of dead actors are free a moment later

    def _hosts(self) -> list[Any]:
        return [_actor(host_name(self._config.pool, rank)) for rank in range(self._ranks)]

    def _place(self) -> PlacementGroup:
        """The pool's placement group, made if need be. YardError when the cluster has no room for it."""
        bundles: list[dict[str, float]] = [self._bundle() for _ in range(self._ranks)]
        group = _placement_group(self._config.pool)
        if group is not None and group.bundle_specs != bundles:
            ray.util.remove_placement_group(group)
            group = None
        if group is None:
            group = ray.util.placement_group(
                bundles,
                # One MPI world is one launcher, on one node; NCCL groups may span nodes.
                strategy="STRICT_PACK" if self._spec.device == "cpu" else "PACK",
                name=group_name(self._config.pool),
                lifetime="detached",
                bundle_label_selector=[dict(self._spec.node_labels) for _ in bundles],
            )
        if not group.wait(PLACEMENT_TIMEOUT_S):
            labels = f" with labels {self._spec.node_labels}" if self._spec.node_labels else ""
            raise unavailable(
                f"pool `{self._config.pool}`: no node{labels} has room for {self._ranks} × {self._bundle()}; "
                f"add a node, free one, or lower devices or memory (nodes declare {POOL_RESOURCE} when they start)"
            )
        return group

    def _bundle(self) -> dict[str, float]:
        bundle: dict[str, float] = {"CPU": 1.0, POOL_RESOURCE: float(self._config.capacity_bytes // 2**20)}
        if self._spec.device == "cuda":
            bundle["GPU"] = 1.0
        return bundle


def _placement_group(pool: str) -> PlacementGroup | None:
    try:
        return ray.util.get_placement_group(group_name(pool))
    except ValueError:
        return None


def _actor(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _reach(call: Callable[[], _T]) -> _T:
    """The call's result; what Ray says about an actor that is gone becomes a YardError."""
    try:
        return call()
    except RayTaskError as error:
        raise unavailable(str(error.cause if getattr(error, "cause", None) else error)) from error
    except (RayActorError, GetTimeoutError) as error:
        raise unavailable(f"a rank host is gone or does not answer: {error}") from error
