"""The arena's driver over host memory: pages are memory files, mapped and unmapped under reserved addresses as on a GPU.

Stricter than the GPU's driver: what would be undefined there is an error here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import torch

from workers.memory.copy_engine import Arrival, Chunk, Link
from workers.memory.cuda_driver import CudaError

PAGE_BYTES = 65536
PROT_NONE, MAP_FIXED, MAP_NORESERVE = 0, 0x10, 0x4000  # Linux; the mmap module does not name them

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MemfdDriver:
    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.pages: dict[int, int] = {}  # handle -> bytes
        self.ranges: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}  # address -> (bytes, handle)
        self.created = 0

    def granularity_bytes(self) -> int:
        return mmap.PAGESIZE

    def create(self, size_bytes: int) -> int:
        if sum(self.pages.values()) + size_bytes > self.total_bytes:
            raise MemoryError("the simulated GPU is full")
        handle = os.memfd_create("page")
        os.ftruncate(handle, size_bytes)
        self.pages[handle] = size_bytes
        self.created += 1
        return handle

    def release(self, handle: int) -> None:
        if any(each == handle for _, each in self.mapped.values()):
            raise CudaError("released while mapped")
        del self.pages[handle]
        os.close(handle)

    def reserve(self, size_bytes: int, alignment_bytes: int) -> int:
        address = self._mmap(None, size_bytes, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1)
        self.ranges[address] = size_bytes
        return address

    def free_range(self, address: int, size_bytes: int) -> None:
        if self.ranges.pop(address) != size_bytes or any(address <= each < address + size_bytes for each in self.mapped):
            raise CudaError("not a whole range without pages")
        _libc.munmap(address, size_bytes)

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        if address in self.mapped or any(each == handle for _, each in self.mapped.values()):
            raise CudaError("mapped twice")
        if not any(start <= address and address + size_bytes <= start + size for start, size in self.ranges.items()):
            raise CudaError("not reserved")
        self._mmap(address, size_bytes, PROT_NONE, mmap.MAP_SHARED | MAP_FIXED, handle)
        self.mapped[address] = (size_bytes, handle)

    def grant(self, address: int, size_bytes: int) -> None:
        self._whole(address, size_bytes)
        if _libc.mprotect(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE):
            raise CudaError("mprotect")

    def unmap(self, address: int, size_bytes: int) -> None:
        for each in self._whole(address, size_bytes):
            del self.mapped[each]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        self._mmap(address, size_bytes, PROT_NONE, flags, -1)

    def memory_info(self) -> tuple[int, int]:
        return self.total_bytes - sum(self.pages.values()), self.total_bytes

    def allocator_bytes(self) -> int:
        return 0

    def storage(self, address: int, size_bytes: int) -> torch.UntypedStorage:
        device = torch.device("cpu")
        return torch._C._construct_storage_from_data_pointer(address, device, size_bytes)  # pyright: ignore[reportReturnType]

    def _whole(self, address: int, size_bytes: int) -> list[int]:
        inside = [each for each in self.mapped if address <= each < address + size_bytes]
        if sum(self.mapped[each][0] for each in inside) != size_bytes:
            raise CudaError("not whole mappings")
        return inside

    def _mmap(self, address: int | None, size_bytes: int, protection: int, flags: int, handle: int) -> int:
        result = _libc.mmap(address, size_bytes, protection, flags, handle, 0)
        if result in (None, ctypes.c_void_p(-1).value):
            raise MemoryError("mmap")
        return result


class FailingDriver:
    """Any driver, with the n-th call of one kind failing."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.call = ""
        self.calls_left = 0

    def arm(self, call: str, nth: int) -> None:
        self.call, self.calls_left = call, nth

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._driver, name)
        if name != self.call:
            return method

        def counted(*args: Any) -> Any:
            self.calls_left -= 1
            if self.calls_left == 0:
                raise (MemoryError if name == "create" else CudaError)(f"{name} made to fail")
            return method(*args)

        return counted


class Arrived:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: torch.cuda.Stream) -> None:
        pass


class MemoryLane:
    """Copies at once, and keeps what it copied in order."""

    def __init__(self, name: str, link: Link) -> None:
        self.name = name
        self.link: Link = link
        self.copied: list[Chunk] = []

    def copy(self, chunk: Chunk) -> Arrival:
        ctypes.memmove(chunk.destination, chunk.source, chunk.size_bytes)
        self.copied.append(chunk)
        return Arrived()

    def close(self) -> None:
        pass
