"""The pool driver as a Serve replica (or any other process) holds it: start, stop, health."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gateway.api import logs, tracing
from gateway.api.address import listen_address
from gateway.api.config import EngineSpec, PoolSpec
from gateway.api.errors import unavailable
from gateway.api.records import PoolRecord
from gateway.api.runtime import Runtime
from workers.driver.canary import AnswerStore
from workers.driver.engine_runtime import EngineRuntime
from workers.driver.engine_seats import EngineSeat, LocalSeat
from workers.driver.heartbeat import Heartbeat
from workers.driver.launcher import RankLauncher
from workers.driver.local_ranks import LocalRanks
from workers.driver.loop import ModelReader, PoolLoop
from workers.driver.observe import footprint_records, group_records, model_totals, rank_records, switch_records
from workers.driver.places import LocalPlaces
from workers.driver.reader import CheckpointReader
from workers.driver.server import PoolServer
from workers.rank.config import RankConfig

log = logging.getLogger(__name__)

UNHEALTHY_S = 150.0
"""Requests in flight and no step for so long is unhealthy (rule 11): the core's own remedy, new ranks, did not help."""
STOP_GRACE_S = 20.0
MODELS_A_DEVICE = 4.0
TORCH_VERSION = version("torch")  # read once: it is said with every heartbeat


class PoolDriverReplica:
    """One pool. `launcher` says where its ranks run; by default inside Ray when Ray is there, else as child processes."""

    def __init__(
        self,
        runtime: Runtime,
        pool: str,
        spec_json: str,
        launcher: RankLauncher | None = None,
        reader: ModelReader | None = None,
    ) -> None:
        self._runtime = runtime
        self._pool = pool
        self._spec = PoolSpec.model_validate_json(spec_json)
        cache_dir = Path(runtime.cache_dir)
        self._answers = AnswerStore(runtime.redis_url, runtime.site, cache_dir)
        self._heartbeat = Heartbeat(runtime.redis_url, runtime.site, pool, actor=f"driver/{pool}")
        launcher = launcher or self._default_launcher()
        self._engine = EngineRuntime(_engine_settings(runtime), self._seat(), cache_dir)
        self.loop = PoolLoop(
            pool,
            self._spec,
            launcher,
            reader or CheckpointReader(cache_dir, self._answers),
            self._heartbeat,
            runtime.secret,
            engine=self._engine,
        )
        port_file = self.rank_config(runtime, pool, self._spec).directory / "driver.port"
        host = listen_address(runtime.bind_host)
        self._server = PoolServer(self.loop, self.record, runtime.secret, host, port_file, tls=runtime.internal_tls)
        self._unix_offset = time.time() - self.loop.now()
        self._started_unix = time.time()
        self._publishing: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> str:
        return self._server.endpoint

    async def start(self) -> None:
        logs.install(Path(self._runtime.run_dir), f"pool-{self._pool}")
        tracing.start("modelyard-pool")
        self.loop.core.state.fence = await self._heartbeat.newest_fence()
        endpoint = await self._server.start()
        log.info("pool %s: listening on %s", self._pool, endpoint)
        self.loop.start()
        self._publishing = asyncio.create_task(self._heartbeat.run(self.record), name="heartbeat")

    async def stop(self, *, end_ranks: bool | None = None) -> None:
        """Finish streams within the grace. Ranks end with the pool and stay for the next driver otherwise.

        `end_ranks` None: the pool is deleted when Redis says that nobody wants it; ranks that nobody adopts end by themselves.
        """
        if end_ranks is None:
            end_ranks = await self._heartbeat.pool_is_deleted()
        await self.loop.drain(STOP_GRACE_S)
        await self._server.stop(0.5)
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.gather(self._publishing, return_exceptions=True)
        await self._heartbeat.withdraw()
        await self.loop.close(end_ranks=end_ranks)
        await self._heartbeat.close()
        await self._answers.close()
        tracing.stop()

    def check_health(self) -> None:
        """YardError when the driver cannot go on by itself; Serve then starts another, which adopts the ranks."""
        if self.loop.failure:
            raise unavailable(f"pool `{self._pool}`: {self.loop.failure}")
        if self._publishing is not None and self._publishing.done() and not self._publishing.cancelled():
            raise unavailable(f"pool `{self._pool}`: its heartbeat ended: {self._publishing.exception()!r}")
        if self.loop.stalled_s > UNHEALTHY_S:
            raise unavailable(f"pool `{self._pool}`: requests in flight and no step for {self.loop.stalled_s:.0f} s")

    def record(self) -> PoolRecord:
        state, versions = self.loop.core.state, self._engine_versions()
        return PoolRecord(
            pool=self._pool,
            endpoint=self._server.endpoint,
            incarnation=self.loop.incarnation,
            node=os.uname().nodename,
            pid=os.getpid(),
            device=state.device,
            fence=state.fence,
            revision=state.revision,
            heartbeat_unix=time.time(),
            ranks=rank_records(state, self.loop.welcomes, self.loop.device_loads, self.loop.seen),
            groups=group_records(state, self.loop.now(), self._unix_offset),
            version=self._runtime.version,
            last_step_unix=state.last_step_at + self._unix_offset if state.last_step_at else 0.0,
            switches=switch_records(state),
            totals=model_totals(state),
            started_unix=self._started_unix,
            rank_restarts=state.rank_restarts,
            steps=state.steps_done,
            held=sum(map(len, state.held.values())),
            engine_versions=versions,
            footprints=footprint_records(state, self.loop.welcomes, versions),
            trtllm=self._engine.record() if "trtllm" in self._spec.engines and self._spec.device == "cuda" else None,
            message=state.message if state.message or state.ranks_up else "its ranks are starting",
        )

    def _engine_versions(self) -> dict[str, str]:
        features = self._engine.features
        return {"torch": TORCH_VERSION} | ({"trtllm": features.version} if features is not None else {})

    def _default_launcher(self) -> RankLauncher:
        config = self.rank_config(self._runtime, self._pool, self._spec)
        with_ranks = "torch" in self._spec.engines
        if _ray_is_there():
            from workers.driver.ray_places import RayPlaces
            from workers.driver.ray_ranks import RayRanks

            if with_ranks:
                return RayRanks(config, self._spec)
            # Ray gives each rank of TensorRT-LLM's Ray orchestrator a CPU; as many models can live on a device.
            in_ray = _engine_settings(self._runtime).orchestrator == "ray"
            return RayPlaces(config, self._spec, cpus=MODELS_A_DEVICE if in_ray else 1.0)
        return LocalRanks(config, self._spec.devices) if with_ranks else LocalPlaces(self._spec.devices, self._spec.device)

    def _seat(self) -> EngineSeat:
        if _ray_is_there():
            from workers.driver.ray_seats import RaySeat

            return RaySeat(self._pool)
        return LocalSeat(self.rank_config(self._runtime, self._pool, self._spec).directory)

    @staticmethod
    def rank_config(runtime: Runtime, pool: str, spec: PoolSpec) -> RankConfig:
        return RankConfig(
            pool=pool,
            rank=0,
            device=spec.device,
            capacity_bytes=spec.memory or 0,
            directory=Path(runtime.run_dir) / "pools" / pool,
            cache_dir=Path(runtime.cache_dir),
            grace_s=spec.rank_grace_s,
            secret=runtime.secret,
            standby_bytes=spec.standby,
        )


def _engine_settings(runtime: Runtime) -> EngineSpec:
    return EngineSpec.model_validate_json(runtime.trtllm) if runtime.trtllm else EngineSpec()


def _ray_is_there() -> bool:
    try:
        ray: Any = __import__("ray")
    except ImportError:
        return False
    return bool(ray.is_initialized())
