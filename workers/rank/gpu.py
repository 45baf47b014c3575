"""What a rank of a cuda pool is made of: the arena on its GPU, the space where models stand by, and the engines."""

from __future__ import annotations

import torch

from gateway.api.errors import ErrorCode, YardError
from workers.comm.base import GroupComm
from workers.comm.single import SingleComm
from workers.engines.base import Engine
from workers.engines.torch.cuda.residency import ParkingSpace
from workers.memory.copy_engine import CopyEngine
from workers.memory.cuda_arena import CudaArena
from workers.memory.cuda_driver import CudaDriver
from workers.memory.lanes import lanes_of
from workers.memory.pinned import PinnedPool
from workers.rank.config import RankConfig

_PARKING_SHARE = 0.5  # of the host memory that is free when the rank starts; pinned as models are parked


class GpuRank:
    def __init__(self, config: RankConfig) -> None:
        """YardError when this process sees no GPU, or cuda-bindings is missing."""
        if not torch.cuda.is_available():
            raise YardError(
                ErrorCode.INVALID,
                f"pool `{config.pool}` is of device cuda, but rank {config.rank} sees no GPU; start Ray on a node with GPUs (the "
                "pool's bundles ask for one each), or use device: cpu",
            )
        # Ray shows a rank the GPU of its bundle only; ranks that were started otherwise share what there is.
        self._device = torch.device("cuda", config.rank % torch.cuda.device_count())
        self._config = config
        try:
            self.arena = CudaArena(self._device.index, config.capacity_bytes)
        except RuntimeError as error:
            raise YardError(ErrorCode.INVALID, f"pool `{config.pool}`, rank {config.rank}: {error}") from error
        driver = self.arena.driver
        assert isinstance(driver, CudaDriver)
        self._driver = driver
        page_bytes = self.arena.pages.page_bytes
        pinned = PinnedPool(_parking_bytes(), page_bytes, driver.pin, driver.unpin, driver.make_current)
        self._parking = ParkingSpace(pinned, CopyEngine(lanes_of(self.arena)))

    def prepare(self) -> None:
        """First of all on the compute thread."""
        self._driver.make_current()

    def make_engine(self, name: str) -> Engine:
        if name != "torch":
            raise YardError(ErrorCode.INVALID, f"engine {name!r} does not run in a rank; use engine: torch")
        from workers.engines.torch.cuda.engine import GpuEngine

        return GpuEngine(self._config.cache_dir, self._device, self._parking)

    def make_comm(self, ranks: tuple[int, ...], tensor_parallel: int, pipeline_parallel: int, group_id: int) -> GroupComm:
        if tensor_parallel * pipeline_parallel == 1:
            return SingleComm()
        from workers.comm.nccl import DistributedComm

        return DistributedComm(ranks, tensor_parallel, pipeline_parallel, group_id)


def _parking_bytes() -> int:
    with open("/proc/meminfo") as lines:
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return int(available * _PARKING_SHARE)
