"""Ranks inside a detached placement group, one bundle a device, so that Ray knows what a pool holds and shows it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gateway.api.config import PoolSpec
from gateway.api.errors import YardError, unavailable
from gateway.api.runtime import POOL_MEMORY_RESOURCE
from workers.driver.launcher import RANK_MODULE, starts_alone
from workers.driver.local_ranks import START_TIMEOUT_S
from workers.driver.rank_host import NAMESPACE, HostDescription, RankHost, group_name, host_name
from workers.driver.rank_link import listens
from workers.rank.config import RankConfig

_T = TypeVar("_T")

PLACEMENT_TIMEOUT_S = 30.0
ACTOR_TIMEOUT_S = 30.0
HOST_GPU_SHARE = 0.5
"""Of a bundle's GPU, booked by our own actor: the ranks of TensorRT-LLM's Ray orchestrator find room in the same bundle."""


class RayRanks:
    """Blocking calls of Ray run on a thread; one at a time."""

    def __init__(self, config: RankConfig, spec: PoolSpec, *, module: str = RANK_MODULE) -> None:
        self._config = config
        self._module = module
        self._spec = spec
        self._ranks = spec.devices

    async def find(self) -> list[str] | None:
        try:
            addresses = await asyncio.to_thread(self._find)
        except (YardError, RayError):
            return None
        if addresses is None:
            return None
        return addresses if all([await listens(address) for address in addresses]) else None

    async def start(self) -> list[str]:
        try:
            return await asyncio.to_thread(self._start)
        except RayError as error:
            raise unavailable(f"pool `{self._config.pool}`: Ray does not answer: {error}") from error

    async def stop(self) -> None:
        await asyncio.to_thread(self._stop)

    # ------------------------------------------------------------------ on a thread

    def _find(self) -> list[str] | None:
        hosts = self._living_hosts()
        return self._addresses(hosts) if hosts else None

    def _start(self) -> list[str]:
        hosts = self._living_hosts() or self._new_hosts()
        described: list[HostDescription] = call_hosts(hosts, "describe")
        starters = hosts if starts_alone(self._config.device) else hosts[:1]
        ranks_of = [[rank] for rank in range(self._ranks)] if len(starters) == self._ranks else [list(range(self._ranks))]
        for host, ranks in zip(starters, ranks_of, strict=True):
            call_hosts([host], "clear", ranks)
        one_node = len({host.node_id for host in described}) == 1
        rendezvous = call_hosts(hosts[:1], "meeting_place", one_node)[0] if len(starters) > 1 else ""
        several_nodes = sum(node["Alive"] for node in ray.nodes()) > 1
        for rank, (host, description) in enumerate(zip(starters, described, strict=False)):
            config = replace(
                self._config,
                rank=rank,
                ranks=self._ranks,
                host_pids=tuple(each.pid for each in described),
                node=description.node_name,
                # Where there are several nodes, this driver or the next one may live on another than the ranks.
                listen_host=description.node_ip if several_nodes else "",
                rendezvous=rendezvous,
            )
            call_hosts([host], "launch", config, self._module)
        deadline = time.monotonic() + START_TIMEOUT_S
        for host, ranks in zip(starters, ranks_of, strict=True):
            while not call_hosts([host], "listens", ranks)[0]:
                time.sleep(0.05)
                if time.monotonic() > deadline:
                    raise unavailable(f"the ranks of pool `{self._config.pool}` do not listen after {START_TIMEOUT_S:.0f} s")
        call_hosts(hosts[len(starters) :], "watch", self._config.grace_s)
        return self._addresses(hosts)

    def _living_hosts(self) -> list[Any] | None:
        """The actors of this pool, if they are all there and have the size that the pool has now."""
        hosts = self._hosts()
        group = placement_group_of(self._config.pool)
        if any(host is None for host in hosts) or group is None or group.bundle_specs != self._bundles():
            return None
        try:
            call_hosts(hosts, "describe")
        except YardError:
            return None
        return hosts

    def _new_hosts(self) -> list[Any]:
        self._kill_hosts()
        group = self._place()
        return [self._create_host(group, rank) for rank in range(self._ranks)]

    def _create_host(self, group: PlacementGroup, rank: int) -> Any:
        actor: Any = ray.remote(RankHost)
        bundle = self._bundle()
        return actor.options(
            name=host_name(self._config.pool, rank),
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            num_cpus=self._host_cpus,
            num_gpus=HOST_GPU_SHARE * bundle.get("GPU", 0),
            max_concurrency=16,  # asking an engine what it can do takes a minute
            resources={name: amount for name, amount in bundle.items() if name == POOL_MEMORY_RESOURCE},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        ).remote(self._config.pool, rank, str(self._config.directory))

    def _addresses(self, hosts: Sequence[Any]) -> list[str]:
        own = ray.get_runtime_context().get_node_id()
        described: list[HostDescription] = call_hosts(hosts, "describe")
        both: list[tuple[str, str]] = call_hosts(hosts, "addresses")
        return [
            here if host.node_id == own else elsewhere or here for host, (here, elsewhere) in zip(described, both, strict=True)
        ]

    def _stop(self) -> None:
        self._kill_hosts()
        group = placement_group_of(self._config.pool)
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
        return [actor_of(host_name(self._config.pool, rank)) for rank in range(self._ranks)]

    def _place(self) -> PlacementGroup:
        """The pool's placement group, made if need be. YardError when the cluster has no room for it."""
        group = placement_group_of(self._config.pool)
        if group is not None and group.bundle_specs != self._bundles():
            ray.util.remove_placement_group(group)
            group = None
        if group is None:
            group = ray.util.placement_group(
                self._bundles(),
                # One MPI world is one launcher, on one node; NCCL groups may span nodes.
                strategy="STRICT_PACK" if self._spec.device == "cpu" else "PACK",
                name=group_name(self._config.pool),
                lifetime="detached",
                bundle_label_selector=[dict(self._spec.node_labels) for _ in range(self._ranks)],
            )
        if not group.wait(PLACEMENT_TIMEOUT_S):
            raise unavailable(self._no_room())
        return group

    def _no_room(self) -> str:
        labels = f" with labels {self._spec.node_labels}" if self._spec.node_labels else ""
        if self._spec.device == "cuda":
            gpus = sum(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"])
            free = ray.available_resources().get("GPU", 0)
            return (
                f"pool `{self._config.pool}` asks for {self._ranks} GPUs{labels}; this site has {gpus:.0f}, {free:.0f} of them "
                "free; start Ray on nodes with GPUs (`ray start --num-gpus` where it does not find them), lower devices, or use "
                "device: cpu"
            )
        return (
            f"pool `{self._config.pool}`: no node{labels} has room for {self._ranks} × {self._bundle()}; "
            f"add a node, free one, or lower devices or memory (nodes declare {POOL_MEMORY_RESOURCE} when they start)"
        )

    @property
    def _host_cpus(self) -> float:
        return self._bundle().get("CPU", 0.0)

    def _bundles(self) -> list[dict[str, float]]:
        return [self._bundle() for _ in range(self._ranks)]

    def _bundle(self) -> dict[str, float]:
        """A GPU brings its memory with it. Host memory that pools may take is what nodes declare; their CPUs are shared."""
        if self._spec.device == "cuda":
            return {"CPU": 1.0, "GPU": 1.0}
        return {POOL_MEMORY_RESOURCE: float(self._config.capacity_bytes // 2**20)}


def placement_group_of(pool: str) -> PlacementGroup | None:
    try:
        return ray.util.get_placement_group(group_name(pool))
    except ValueError:
        return None


def actor_of(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def call_hosts(hosts: Sequence[Any], method: str, *arguments: object, timeout_s: float = ACTOR_TIMEOUT_S) -> list[Any]:
    """Results by host. YardError when one of them fails, is gone or does not answer."""
    try:
        return ray.get([getattr(host, method).remote(*arguments) for host in hosts], timeout=timeout_s)
    except RayTaskError as error:
        raise unavailable(str(error.cause or error)) from error
    except (RayActorError, GetTimeoutError) as error:
        raise unavailable(f"a rank host is gone or does not answer: {error}") from error
