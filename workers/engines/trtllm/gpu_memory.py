"""What the GPUs of this node hold, asked of NVML through the `pynvml` that TensorRT-LLM's environment has.

`boot.py memory DEVICES PIDS BYTES TIMEOUT_S` waits until none of the processes holds memory on the devices and the memory that
they held is free, and prints what it saw: memory is measured to be free before it is promised to another model (rule 3).
"""

from __future__ import annotations

import importlib
import json
import time
from dataclasses import dataclass
from typing import Any

POLL_S = 0.2
FREED_SHARE = 0.9
"""Of what a model held, on each device: the rest may have gone to others meanwhile."""
STEADY_S = 5.0
"""Without its processes, and no change for so long: what it held has gone to others, or was never all there."""


@dataclass(frozen=True)
class DeviceUse:
    used_bytes: int
    by_pid: dict[int, int]


class Nvml:
    """ImportError without `pynvml`; RuntimeError where there is no NVIDIA driver."""

    def __init__(self) -> None:
        self._nvml: Any = importlib.import_module("pynvml")
        try:
            self._nvml.nvmlInit()
        except Exception as error:
            raise RuntimeError(f"NVML does not start: {error}") from error

    def use(self, device: int) -> DeviceUse:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(device)
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return DeviceUse(int(memory.used), {int(item.pid): int(item.usedGpuMemory or 0) for item in processes})

    def compute_capability(self, device: int) -> str:
        major, minor = self._nvml.nvmlDeviceGetCudaComputeCapability(self._nvml.nvmlDeviceGetHandleByIndex(device))
        return f"{major}.{minor}"


class Meter:
    """What one model holds on some devices, measured around each of its operations.

    By process, where NVML tells of those that came while it loaded: loads of a device are serialised, so these are its ranks. In
    containers NVML may tell of none; then what is used more or less after an operation is taken for its doing.
    """

    def __init__(self, nvml: Nvml, devices: list[int]) -> None:
        self._nvml = nvml
        self._devices = devices
        self._pids: set[int] = set()
        self._sizes = [0] * len(devices)
        self._before: list[DeviceUse] = []

    def begin(self) -> None:
        self._before = [self._nvml.use(device) for device in self._devices]

    def end(self) -> tuple[list[int], list[int]]:
        """(bytes by device, the processes that hold them) after the operation that began."""
        after = [self._nvml.use(device) for device in self._devices]
        if not self._pids:
            known = {pid for use in self._before for pid in use.by_pid}
            self._pids = {pid for use in after for pid in use.by_pid} - known
        for index, use in enumerate(after):
            if self._pids:
                self._sizes[index] = sum(size for pid, size in use.by_pid.items() if pid in self._pids)
            else:
                self._sizes[index] = max(0, self._sizes[index] + use.used_bytes - self._before[index].used_bytes)
        return list(self._sizes), sorted(self._pids)


def wait_free(
    nvml: Nvml, devices: list[int], pids: list[int], held: list[int], used: list[int], timeout_s: float
) -> dict[str, Any]:
    """`held`: what the model held on each device; `used`: what the device had in use while it did."""
    end = time.monotonic() + timeout_s
    last: list[int] = []
    steady_since = time.monotonic()
    while True:
        uses = [nvml.use(device) for device in devices]
        now = [use.used_bytes for use in uses]
        if now != last:
            last, steady_since = now, time.monotonic()
        left = {pid: size for use in uses for pid, size in use.by_pid.items() if pid in pids}
        freed = [before - after for before, after in zip(used, now, strict=True)]
        all_freed = all(got >= FREED_SHARE * size for got, size in zip(freed, held, strict=True))
        free = not left and (all_freed or time.monotonic() - steady_since >= STEADY_S)
        if free or time.monotonic() >= end:
            return {"free": free, "used": now, "freed": freed, "by_pid": left}
        time.sleep(POLL_S)


def main(arguments: list[str]) -> int:
    """DEVICES PIDS HELD USED TIMEOUT_S, the lists as JSON; without PIDS, what is in use now."""
    nvml = Nvml()
    devices = json.loads(arguments[0])
    if len(arguments) == 1:
        print(json.dumps({"used": [nvml.use(device).used_bytes for device in devices]}))
        return 0
    pids, held, used = (json.loads(argument) for argument in arguments[1:4])
    print(json.dumps(wait_free(nvml, devices, pids, held, used, float(arguments[4]))))
    return 0
