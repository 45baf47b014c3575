"""A rank that has a device of its own and meets its peers by itself. What lies below it, `gpu` or `rehearsal`, is given."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from gateway.api.errors import ErrorCode, YardError
from workers.comm.base import GroupComm
from workers.comm.nccl import DistributedComm, Meeting, open_store
from workers.comm.single import SingleComm
from workers.engines.base import Engine
from workers.engines.torch.cuda.engine import GpuEngine
from workers.engines.torch.cuda.residency import ParkingSpace
from workers.memory.arena import Arena
from workers.messages import DeviceFacts, DeviceMemory
from workers.rank.config import RankConfig
from workers.rank.device_load import HostLoad, LoadProbe

MEET_TIMEOUT_S = 120.0


class DeviceRank:
    facts = DeviceFacts()

    def __init__(
        self,
        config: RankConfig,
        device: torch.device,
        arena: Arena,
        memory: Callable[[], DeviceMemory],
        taken_bytes: Callable[[], int],
        prepare: Callable[[], None],
        parking: ParkingSpace | None = None,
    ) -> None:
        """`prepare` binds a thread to the device. `taken_bytes`: on the device, outside of the arena's pages."""
        self.arena = arena
        self.memory = memory
        self.prepare = prepare
        self._config = config
        self._device = device
        self._taken_bytes = taken_bytes
        self._parking = parking

    @functools.cached_property
    def _meeting(self) -> Meeting:
        config = self._config
        store = open_store(config.rendezvous, config.rank, config.ranks, MEET_TIMEOUT_S)
        return Meeting(store, config.rank, self._device, MEET_TIMEOUT_S, self._taken_bytes)

    def load_probe(self) -> LoadProbe:
        return HostLoad()

    def make_engine(self, name: str) -> Engine:
        if name != "torch":
            raise YardError(ErrorCode.INVALID, f"engine {name!r} does not run in a rank; use engine: torch")
        return GpuEngine(self._config.cache_dir, self._device, self._parking)

    def make_comm(self, ranks: tuple[int, ...], tensor_parallel: int, pipeline_parallel: int, number: int) -> GroupComm:
        if tensor_parallel * pipeline_parallel == 1:
            return SingleComm()
        return DistributedComm(self._meeting, ranks, tensor_parallel, pipeline_parallel, number)
