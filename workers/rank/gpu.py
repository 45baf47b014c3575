"""What lies below a rank of a cuda pool: one GPU, the pool's arena on it, and the space where models stand by."""

from __future__ import annotations

import logging
import threading

import torch

from gateway.api.errors import ErrorCode, YardError
from workers.engines.torch.cuda.residency import ParkingSpace
from workers.memory.copy_engine import CopyEngine
from workers.memory.cuda_arena import PAGE_BYTES, CudaArena
from workers.memory.cuda_driver import CudaDriver
from workers.memory.lanes import lanes_of
from workers.memory.pinned import PinnedPool
from workers.messages import DeviceMemory
from workers.rank.config import RankConfig
from workers.rank.device import DeviceRank
from workers.rank.device_facts import device_facts
from workers.rank.device_load import GpuLoad, LoadProbe, gpu_link_bytes_per_s
from workers.rank.host_memory import available_bytes
from workers.rank.numa import stay_beside

log = logging.getLogger(__name__)

_PARKING_SHARE = 0.5  # of the host memory that is free when the rank starts; pinned as models are parked
_AHEAD_SHARE = 0.9  # of it at most is pinned ahead, where the pool's `standby` says how much
_AHEAD_THREADS = 4  # each takes about half a second a GiB
RESERVE_BYTES = 2**30
"""Of a card, never used where the pool's `memory` is not given: for what libraries take outside of the pool's count."""


class GpuRank(DeviceRank):
    arena: CudaArena

    def __init__(self, config: RankConfig) -> None:
        """YardError when this process sees no GPU, or cuda-bindings is missing."""
        if not torch.cuda.is_available():
            raise YardError(
                ErrorCode.INVALID,
                f"pool `{config.pool}` is of device cuda, but rank {config.rank} sees no GPU; start Ray on a node with GPUs (the "
                "pool's bundles ask for one each), or use device: cpu",
            )
        # Ray shows a rank the GPU of its bundle only; ranks that were started otherwise share what there is.
        device = torch.device("cuda", config.rank % torch.cuda.device_count())
        used_before = _used_bytes(device)
        try:
            driver = CudaDriver(device.index)
        except RuntimeError as error:
            raise YardError(ErrorCode.INVALID, f"pool `{config.pool}`, rank {config.rank}: {error}") from error
        free, total = driver.memory_info()
        foreign = max(0, used_before - _reserved_bytes(device, total)) if used_before else 0
        context = max(0, total - free - foreign)
        capacity = min(config.capacity_bytes or total, total - RESERVE_BYTES)
        room = capacity - context - DeviceMemory(capacity, total, free, context, foreign, 0).intruding_bytes
        arena = CudaArena(device.index, max(room, PAGE_BYTES), driver=driver)
        parking_bytes = max(config.standby_bytes, int(available_bytes() * _PARKING_SHARE / config.ranks))
        pinned = PinnedPool(parking_bytes, arena.pages.page_bytes, driver.pin, driver.unpin, driver.make_current)
        ahead_bytes = min(config.standby_bytes, int(available_bytes() * _AHEAD_SHARE / config.ranks))
        for _ in range(_AHEAD_THREADS if ahead_bytes else 0):
            threading.Thread(target=pinned.pin_ahead, args=(ahead_bytes,), name="pin-ahead", daemon=True).start()

        def memory() -> DeviceMemory:
            arena.leave_free(RESERVE_BYTES)
            report = arena.report()
            return DeviceMemory(capacity, report.total_bytes, report.free_bytes, context, foreign, report.kept_bytes)

        def taken_bytes() -> int:
            report = arena.report()
            return report.torch_bytes + report.other_bytes

        self.facts = device_facts(torch.cuda.get_device_properties(device))
        stay_beside(self.facts.numa)
        parking = ParkingSpace(pinned, CopyEngine(lanes_of(arena)))
        super().__init__(config, device, arena, memory, taken_bytes, driver.make_current, parking)

    def load_probe(self) -> LoadProbe:
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        return GpuLoad(uuid, gpu_link_bytes_per_s(self._device))


def _used_bytes(device: torch.device) -> int:
    """Of the card, by NVML: asked before this process has a context there. 0 without NVML."""
    try:
        return torch.cuda.device_memory_used(device)
    except (ImportError, RuntimeError) as error:
        log.warning("NVML does not answer (%s): what other processes use counts as this one's context", error)
        return 0


def _reserved_bytes(device: torch.device, total_bytes: int) -> int:
    """What NVML calls used and CUDA does not have: the driver's own share of the card, 615 MiB on an H200."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return int(pynvml.nvmlDeviceGetMemoryInfo(card).total) - total_bytes
    except Exception as error:  # noqa: BLE001 - an optional package over an optional driver library: both fail in their own ways
        log.warning("NVML does not say what the driver keeps of the card: %s: %s", type(error).__name__, error)
        return 0
