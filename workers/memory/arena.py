"""Memory of one device, as address ranges whose physical pages come and go.

A `Region` is an address range reserved once; `commit` puts pages under its first bytes and takes pages beyond them away, so
pointers and tensors into what stays committed survive. `HostArena` is anonymous memory; the CUDA arena speaks the same words.
"""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

MAP_NORESERVE = 0x4000  # Linux; Python 3.13 has it in mmap
HOST_PAGE_BYTES = 2 * 2**20  # multiple of the huge page, so that madvise returns whole ones


class Region(Protocol):
    name: str
    reserved_bytes: int
    committed_bytes: int

    def commit(self, size_bytes: int) -> None:
        """Bytes 0..size become usable (rounded up to pages), those beyond are given back. MemoryError changes nothing."""
        ...

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset_bytes: int = 0) -> torch.Tensor:
        """A view of the reserved range; touch only what is committed."""
        ...

    def close(self) -> None: ...


class Arena(Protocol):
    capacity_bytes: int

    @property
    def committed_bytes(self) -> int: ...

    def reserve(self, name: str, size_bytes: int) -> Region:
        """Address space only. ValueError when the name is taken."""
        ...

    def regions(self) -> dict[str, int]:
        """Committed bytes by region name."""
        ...


class HostRegion:
    def __init__(self, arena: HostArena, name: str, size_bytes: int) -> None:
        self.name = name
        self.reserved_bytes = _round_up(max(size_bytes, 1))
        self.committed_bytes = 0
        self._arena = arena
        self._map = mmap.mmap(-1, self.reserved_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        import torch  # here: a pool driver reads the constants above and starts seconds earlier without it

        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def commit(self, size_bytes: int) -> None:
        wanted = _round_up(size_bytes)
        if wanted > self.reserved_bytes:
            raise MemoryError(f"region {self.name}: {wanted} bytes asked, {self.reserved_bytes} reserved")
        self._arena.account(self.name, wanted - self.committed_bytes)
        if wanted < self.committed_bytes:
            self._map.madvise(mmap.MADV_DONTNEED, wanted, self.committed_bytes - wanted)
        self.committed_bytes = wanted

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset_bytes: int = 0) -> torch.Tensor:
        count = 1
        for dimension in shape:
            count *= dimension
        end = offset_bytes + count * dtype.itemsize
        return self._bytes[offset_bytes:end].view(dtype).view(shape)

    def close(self) -> None:
        """Pages go back at once; the address range goes when the last tensor into it does. Closing again does nothing."""
        if self._arena.forget(self):
            self.commit(0)


class HostArena:
    """Shared by the thread that computes and those that load; each region is used by one thread at a time."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._regions: dict[str, HostRegion] = {}
        self._committed_bytes = 0

    @property
    def committed_bytes(self) -> int:
        return self._committed_bytes

    def reserve(self, name: str, size_bytes: int) -> HostRegion:
        region = HostRegion(self, name, size_bytes)
        with self._lock:
            if self._regions.setdefault(name, region) is not region:
                raise ValueError(f"region {name} exists")
        return region

    def regions(self) -> dict[str, int]:
        with self._lock:
            return {name: region.committed_bytes for name, region in self._regions.items()}

    def account(self, name: str, delta_bytes: int) -> None:
        """Called by regions. MemoryError when the capacity does not suffice; giving back always succeeds."""
        with self._lock:
            free = self.capacity_bytes - self._committed_bytes
            if delta_bytes > max(free, 0):
                raise MemoryError(f"region {name} asks for {delta_bytes} more bytes, {free} of {self.capacity_bytes} are free")
            self._committed_bytes += delta_bytes

    def forget(self, region: HostRegion) -> bool:
        """Called by regions that close. False when it was closed before."""
        with self._lock:
            if self._regions.get(region.name) is not region:
                return False
            del self._regions[region.name]
            return True


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // HOST_PAGE_BYTES) * HOST_PAGE_BYTES
