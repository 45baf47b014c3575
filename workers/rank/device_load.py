"""What a rank's device is doing, as its operators see it elsewhere too: how busy, how full, and how fast its link is."""

from __future__ import annotations

import logging
import os
import time
from typing import Any, Protocol

import numpy as np
import psutil

from workers.messages import DeviceLoad

log = logging.getLogger(__name__)

LOAD_EVERY_S = 2.0
_PROBE_BYTES = 32 * 2**20
_PROBES = 3


class LoadProbe(Protocol):
    def __call__(self) -> DeviceLoad: ...


class HostLoad:
    """A CPU rank: the cores that its process keeps busy, of those it may use, and what it has in memory."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()
        self._cores = len(os.sched_getaffinity(0))
        self._link_bytes_per_s = host_copy_bytes_per_s()

    def __call__(self) -> DeviceLoad:
        busy = self._process.cpu_percent() / 100 / self._cores
        memory = self._process.memory_info().rss
        return DeviceLoad(min(busy, 1.0), memory, psutil.virtual_memory().total, self._link_bytes_per_s)


class GpuLoad:
    """NVML's view of one card, by the UUID that CUDA gives it. Without the package `nvidia-ml-py` only the memory is known."""

    def __init__(self, uuid: str, link_bytes_per_s: float) -> None:
        self._link_bytes_per_s = link_bytes_per_s
        self._nvml, self._card = _nvml_card(uuid)

    def __call__(self) -> DeviceLoad:
        if self._nvml is None:
            return DeviceLoad(-1.0, *_cuda_memory(), self._link_bytes_per_s)
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._card)
        busy = self._nvml.nvmlDeviceGetUtilizationRates(self._card).gpu / 100
        return DeviceLoad(busy, int(memory.used), int(memory.total), self._link_bytes_per_s)


def host_copy_bytes_per_s() -> float:
    """What bringing weights back can reach on a CPU rank: one copy in memory, the fastest of a few."""
    source, target = np.ones(_PROBE_BYTES, np.uint8), np.zeros(_PROBE_BYTES, np.uint8)
    return _PROBE_BYTES / min(_timed(lambda: np.copyto(target, source)) for _ in range(_PROBES))


def gpu_link_bytes_per_s(device: Any) -> float:
    """From pinned host memory to a GPU, the fastest of a few copies. The memory for it is given back."""
    import torch

    try:
        return _gpu_copy_bytes_per_s(torch, device)
    finally:
        torch.cuda.empty_cache()


def _gpu_copy_bytes_per_s(torch: Any, device: Any) -> float:
    source = torch.empty(2 * _PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(2 * _PROBE_BYTES, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    return source.numel() / min(_timed(copy) for _ in range(_PROBES + 1))


def _timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return max(time.perf_counter() - began, 1e-9)


def _nvml_card(uuid: str) -> tuple[Any, Any]:
    try:
        import pynvml  # pyright: ignore[reportMissingImports] - optional

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except Exception as error:  # noqa: BLE001 - an optional package over an optional driver library: both fail in their own ways
        log.warning("the GPU's use is not known: %s: %s (pip install nvidia-ml-py)", type(error).__name__, error)
        return None, None


def _cuda_memory() -> tuple[int, int]:
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free, total
