"""The controller's effects on Ray Serve, pool drivers and Redis."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import grpc
import msgspec

from gateway.api.config import PoolSpec
from gateway.api.pool_channel import pool_channel
from gateway.api.proto.pool_pb2 import Assignment, AssignRequest
from gateway.api.proto.pool_pb2_grpc import PoolControlStub
from gateway.api.records import HEARTBEAT_TTL_S, ControllerRecord, FootprintRecord, NodeRecord
from gateway.api.runtime import SECRET_METADATA_KEY, Runtime
from gateway.controller import pool_applications
from gateway.controller.effects import StaleFence, Unreachable
from gateway.controller.situation import AppSight
from gateway.state.footprint_record import load_footprints, save_footprints
from gateway.state.history import History
from gateway.state.lease import Lease
from gateway.state.placement_record import load_placement, save_placement
from gateway.state.store import SiteStore
from placement.types import PlacedGroup

P = ParamSpec("P")
T = TypeVar("T")

ASSIGN_S = 3.0
SERVE_S = 60.0


class SiteEffects:
    """Every call has a deadline (rule 15). Serve calls share one thread, so they never overlap."""

    def __init__(self, runtime: Runtime, store: SiteStore, lease: Lease, actor: str) -> None:
        self._runtime = runtime
        self._store = store
        self._lease = lease
        self._actor = actor
        self._history = History(store)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="serve")

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        for channel in self._channels.values():
            await channel.close()

    async def placement(self) -> tuple[PlacedGroup, ...] | None:
        return await load_placement(self._store)

    async def save_placement(self, groups: tuple[PlacedGroup, ...]) -> bool:
        return await save_placement(self._store, self._lease, groups)

    async def footprints(self) -> tuple[FootprintRecord, ...]:
        return await load_footprints(self._store)

    async def save_footprints(self, footprints: tuple[FootprintRecord, ...]) -> bool:
        return await save_footprints(self._store, self._lease, footprints)

    async def report(self, record: ControllerRecord) -> None:
        await self._lease.write(self._store.keys.controller, msgspec.json.encode(record), HEARTBEAT_TTL_S)

    async def event(self, kind: str, subject: str, message: str) -> None:
        await self._history.record(kind, subject, message, self._actor)

    async def apps(self) -> tuple[dict[str, AppSight], frozenset[str]]:
        return await self._in_thread("reading the applications", pool_applications.status)

    async def nodes(self) -> tuple[NodeRecord, ...]:
        return await self._in_thread("reading the nodes", pool_applications.nodes)

    async def deploy_pool(self, pool: str, spec: PoolSpec) -> None:
        await self._in_thread(f"deploying pool `{pool}`", pool_applications.deploy, self._runtime, pool, spec)

    async def delete_pool(self, pool: str) -> None:
        await self._in_thread(f"deleting pool `{pool}`", pool_applications.delete, pool)

    async def release_devices(self, pool: str) -> None:
        await self._in_thread(f"releasing the devices of pool `{pool}`", pool_applications.release_devices, pool)

    async def assign(self, endpoint: str, fence: int, revision: int, assignments: tuple[bytes, ...]) -> None:
        if endpoint not in self._channels:
            self._channels[endpoint] = pool_channel(endpoint, self._runtime.secret)
        request = AssignRequest(fence=fence, revision=revision, assignments=[Assignment.FromString(item) for item in assignments])
        metadata = ((SECRET_METADATA_KEY, self._runtime.secret),)
        try:
            await PoolControlStub(self._channels[endpoint]).Assign(request, timeout=ASSIGN_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                raise StaleFence(f"the driver at {endpoint} refuses fencing token {fence}: {error.details()}") from error
            # A driver comes back at another port or wants a newer certificate: keep no channel to one that may be gone.
            await self._channels.pop(endpoint).close()
            raise Unreachable(f"the driver at {endpoint} did not take its assignment: {error.details()}") from error

    async def _in_thread(self, what: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(SERVE_S):
                return await loop.run_in_executor(self._thread, functools.partial(function, *args, **kwargs))
        except TimeoutError as error:
            raise Unreachable(f"{what}: Serve did not answer in {SERVE_S:.0f} s") from error
        except pool_applications.SERVE_ERRORS as error:
            raise Unreachable(f"{what}: {type(error).__name__}: {error}") from error
