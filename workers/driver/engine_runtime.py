"""TensorRT-LLM as one pool has it: the site's settings, what the installed version can do, and what a model is to be told."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from gateway.api.checkpoint import open_checkpoint, resolve
from gateway.api.checkpoint.checkpoint import Checkpoint
from gateway.api.config import EngineSpec, ModelSpec
from gateway.api.errors import YardError, unavailable
from gateway.api.records import TrtllmRecord
from gateway.api.trtllm.arguments import Arguments, arguments
from gateway.api.trtllm.demand import demand_of
from gateway.api.trtllm.features import Features
from gateway.api.trtllm.manifest import refuse_misfit
from workers.driver.engine_launch import boot_command, environment
from workers.driver.engine_seats import EngineSeat, Place
from workers.messages import LoadShard

PROBE_TIMEOUT_S = 600.0
ASK_AGAIN_S = 30.0


class EngineRuntime:
    """Owned by the driver's loop."""

    def __init__(self, settings: EngineSpec, seat: EngineSeat, cache_dir: Path) -> None:
        self.settings = settings
        self.seat = seat
        self._cache_dir = cache_dir
        self.features: Features | None = None
        self.problem = ""  # why they are not known
        self._probing: asyncio.Task[Features] | None = None
        self._failed_at = 0.0

    async def known_features(self) -> Features:
        """Asked once, however many wait. YardError says why they cannot be had; asked again a while later."""
        if self.features is not None:
            return self.features
        if self._probing is None:
            if self.problem and time.monotonic() - self._failed_at < ASK_AGAIN_S:
                raise unavailable(self.problem, ASK_AGAIN_S)
            self._probing = asyncio.create_task(self._probe(), name="probe-trtllm")
        try:
            return await asyncio.shield(self._probing)
        finally:
            if self._probing is not None and self._probing.done():
                self._probing = None

    async def _probe(self) -> Features:
        try:
            command = boot_command(self.settings, "probe")
            place = await self.seat.place((0,))
            text = await self.seat.run(command, self.environment(place), PROBE_TIMEOUT_S)
            # The library prints to standard output too, while it is imported.
            self.features = msgspec.json.decode(text.strip().splitlines()[-1], type=Features)
        except (YardError, msgspec.MsgspecError, IndexError) as error:
            self.problem, self._failed_at = f"TensorRT-LLM cannot be asked what it can do: {error}", time.monotonic()
            raise unavailable(self.problem, ASK_AGAIN_S) from error
        self.problem = ""
        return self.features

    def record(self) -> TrtllmRecord | None:
        """None where the site has none. Short, for it goes with every heartbeat; without variables, which may be secrets."""
        if self.settings.python is None:
            return None
        settings = self.settings.model_copy(update={"environment": {}})
        features = self.features and msgspec.structs.replace(self.features, generate=(), sampling=())
        return TrtllmRecord(settings.model_dump_json(), features, self.problem)

    def environment(self, place: Place) -> dict[str, str]:
        return environment(self.settings, self.seat.environment, place.devices, place.ray_address)

    async def check(self, model: str, spec: ModelSpec) -> None:
        """YardError names what this version or this checkpoint lacks; before anything is reserved or stopped for it."""
        features = await self.known_features()
        checkpoint = await asyncio.to_thread(self._open, model, spec, features)
        arguments(demand_of(model, spec, checkpoint, 1, 1), features, self.settings)

    async def arguments_for(self, command: LoadShard, spec: ModelSpec, place: Place) -> tuple[Arguments, Checkpoint]:
        """YardError names what this version or this checkpoint lacks."""
        features = await self.known_features()
        degrees = (command.tensor_parallel, command.pipeline_parallel)
        checkpoint = await asyncio.to_thread(self._open, command.model, spec, features, degrees)
        kv_bytes = command.budget["kv_floor"]
        demand = demand_of(command.model, spec, checkpoint, command.tensor_parallel, command.pipeline_parallel)
        tokens = command.kv_floor_blocks * command.kv_block_tokens
        demand = replace(demand, kv_bytes=kv_bytes, kv_tokens=tokens, ranks_on_node=len(place.devices))
        return arguments(demand, features, self.settings), checkpoint

    def _open(self, model: str, spec: ModelSpec, features: Features, degrees: tuple[int, int] | None = None) -> Checkpoint:
        """YardError for an artifact that was made for another machine or version."""
        refuse_misfit(model, resolve(spec.source), features, degrees)
        return open_checkpoint(spec.source, self._cache_dir)
