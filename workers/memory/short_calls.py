"""The driver calls a wake makes hundreds of times, made without giving the interpreter lock up.

cuda-bindings and torch give it up around every call, and beside a busy thread it takes a switch interval (5 ms) to get it back:
a wake of 13.5 GB took 10.7 s instead of 0.25 s. The calls here take microseconds, so they keep it.
"""

from __future__ import annotations

import ctypes

import torch

SUCCESS, OUT_OF_MEMORY, NOT_READY = 0, 2, 600  # CUresult
EVENT_FLAGS = 1 | 2  # CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING
ON_A_GPU, READ_WRITE = 1, 3  # CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class CudaError(RuntimeError):
    """A driver call failed. The message names the call, the GPU and the driver's error."""


def failure(call: str, device: int, code: int, name: str) -> Exception:
    """What to raise for an error code."""
    return (MemoryError if code == OUT_OF_MEMORY else CudaError)(f"{call} on GPU {device}: {name}")


class _AccessDesc(ctypes.Structure):
    """CUmemAccessDesc with its CUmemLocation."""

    _fields_ = (("location_type", ctypes.c_int), ("location_id", ctypes.c_int), ("flags", ctypes.c_int))


class ShortCalls:
    """See `CudaDriver` for what the calls do. `peers` get access to what is granted."""

    def __init__(self, device: int, peers: tuple[int, ...]) -> None:
        self.device = device
        keeping, giving = ctypes.PyDLL("libcuda.so.1"), ctypes.CDLL("libcuda.so.1")
        number, size, pointer, flags = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint
        self._map = _typed(keeping.cuMemMap, number, size, size, number, number)
        self._grant = _typed(keeping.cuMemSetAccess, number, size, pointer, size)
        self._copy = _typed(keeping.cuMemcpyAsync, number, number, size, pointer)
        self._event_create = _typed(keeping.cuEventCreate, pointer, flags)
        self._event_record = _typed(keeping.cuEventRecord, pointer, pointer)
        self._event_query = _typed(keeping.cuEventQuery, pointer)
        self._event_destroy = _typed(keeping.cuEventDestroy_v2, pointer)
        self._stream_wait = _typed(keeping.cuStreamWaitEvent, pointer, pointer, flags)
        self._event_synchronize = _typed(giving.cuEventSynchronize, pointer)  # The one call that waits
        self._error_name = _typed(keeping.cuGetErrorName, ctypes.c_int, pointer)
        members = (device, *peers)
        self._access = (_AccessDesc * len(members))(*(_AccessDesc(ON_A_GPU, member, READ_WRITE) for member in members))

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        self._check("cuMemMap", self._map(address, size_bytes, 0, handle, 0))

    def grant(self, address: int, size_bytes: int) -> None:
        access = ctypes.addressof(self._access)
        self._check("cuMemSetAccess", self._grant(address, size_bytes, access, len(self._access)))

    def copy(self, destination: int, source: int, size_bytes: int, stream: int) -> None:
        self._check("cuMemcpyAsync", self._copy(destination, source, size_bytes, stream))

    def record(self, stream: int) -> int:
        """A new event at the stream's end."""
        event = ctypes.c_void_p()
        self._check("cuEventCreate", self._event_create(ctypes.byref(event), EVENT_FLAGS))
        handle = event.value or 0
        self._check("cuEventRecord", self._event_record(handle, stream))
        return handle

    def reached(self, event: int) -> bool:
        code = self._event_query(event)
        if code == NOT_READY:
            return False
        self._check("cuEventQuery", code)
        return True

    def sleep_until(self, event: int) -> None:
        self._check("cuEventSynchronize", self._event_synchronize(event))

    def let_wait(self, stream: int, event: int) -> None:
        self._check("cuStreamWaitEvent", self._stream_wait(stream, event, 0))

    def destroy(self, event: int) -> None:
        self._check("cuEventDestroy", self._event_destroy(event))

    def _check(self, call: str, code: int) -> None:
        if code != SUCCESS:
            name = ctypes.c_char_p()
            self._error_name(code, ctypes.byref(name))
            raise failure(call, self.device, code, (name.value or b"unknown error").decode())


class CudaEvent:
    """What torch.cuda.Event is, for the copy engine: a point in a stream."""

    def __init__(self, calls: ShortCalls, stream: int) -> None:
        self._calls = calls
        self._event = calls.record(stream)

    def query(self) -> bool:
        """True once the point is reached."""
        return self._calls.reached(self._event)

    def synchronize(self) -> None:
        """Wait until the point is reached, asleep."""
        self._calls.sleep_until(self._event)

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` wait for it."""
        self._calls.let_wait(stream.cuda_stream, self._event)

    def __del__(self) -> None:
        event = getattr(self, "_event", 0)
        if event:
            self._calls.destroy(event)


def _typed(function: ctypes._NamedFuncPointer, *arguments: type) -> ctypes._NamedFuncPointer:
    function.argtypes = list(arguments)
    return function
