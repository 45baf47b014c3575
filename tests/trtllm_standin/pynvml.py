"""Stands in for nvidia-ml-py: the GPUs that the stand-in of TensorRT-LLM pretends to compute on."""

from __future__ import annotations

from types import SimpleNamespace

from tensorrt_llm_standin_gpu import GPU_BYTES, entries


def nvmlInit() -> None:
    pass


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    used = sum(size for _, size in entries(handle))
    return SimpleNamespace(total=GPU_BYTES, used=used, free=GPU_BYTES - used)


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in entries(handle)]


def nvmlDeviceGetCudaComputeCapability(handle: int) -> tuple[int, int]:
    del handle
    return (9, 0)
