"""Physical memory of one GPU in pages of one size: a hard capacity, pages lent out, and a free list.

Pages are made when first needed and kept when given back, so memory that moves from one region to another costs two mappings
and no allocation. `trim` gives free pages back to the driver.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch


class PageDriver(Protocol):
    """What the pool asks of the machine. `CudaDriver` is the real one; see its docstrings."""

    def granularity_bytes(self) -> int: ...
    def create(self, size_bytes: int) -> int: ...
    def release(self, handle: int) -> None: ...
    def reserve(self, size_bytes: int, alignment_bytes: int) -> int: ...
    def free_range(self, address: int, size_bytes: int) -> None: ...
    def map(self, address: int, size_bytes: int, handle: int) -> None: ...
    def grant(self, address: int, size_bytes: int) -> None: ...
    def unmap(self, address: int, size_bytes: int) -> None: ...
    def memory_info(self) -> tuple[int, int]: ...
    def allocator_bytes(self) -> int: ...
    def storage(self, address: int, size_bytes: int) -> torch.UntypedStorage: ...


class PagePool:
    """Any thread may call. `lent` plus free pages exist; `lent` never exceeds `capacity_pages`."""

    def __init__(self, driver: PageDriver, capacity_bytes: int, page_bytes: int) -> None:
        if page_bytes % driver.granularity_bytes() or page_bytes & (page_bytes - 1):
            raise ValueError(f"page of {page_bytes} bytes: must be a power of two and a multiple of {driver.granularity_bytes()}")
        self.page_bytes = page_bytes
        self.capacity_pages = capacity_bytes // page_bytes
        self.lent = 0
        self._driver = driver
        self._free: list[int] = []
        self._lock = threading.Lock()

    @property
    def free_pages(self) -> int:
        """Pages that exist and that nobody has."""
        return len(self._free)

    @property
    def held_bytes(self) -> int:
        """Bytes taken from the GPU: lent and free pages."""
        return (self.lent + len(self._free)) * self.page_bytes

    def take(self, count: int, region: str) -> list[int]:
        """Handles of `count` pages for `region`. MemoryError lends none."""
        with self._lock:
            room = self.capacity_pages - self.lent
            if count > room:
                raise MemoryError(
                    f"region {region} asks for {count * self.page_bytes} bytes, {room * self.page_bytes} of the pool's"
                    f" {self.capacity_pages * self.page_bytes} are free; park a model or shrink a cache first"
                )
            try:
                while len(self._free) < count:
                    self._free.append(self._driver.create(self.page_bytes))
            except MemoryError as error:
                free, total = self._driver.memory_info()
                raise MemoryError(
                    f"region {region}: the GPU has {free} of {total} bytes left though the pool may take"
                    f" {room * self.page_bytes} more; something outside the pool uses them: end it, or lower the pool's capacity"
                ) from error
            kept = len(self._free) - count
            taken = self._free[kept:]
            del self._free[kept:]
            self.lent += count
            return taken

    def give(self, handles: list[int]) -> None:
        """Take pages back. They must be unmapped."""
        with self._lock:
            self._free.extend(handles)
            self.lent -= len(handles)

    def trim(self, keep_pages: int = 0) -> int:
        """Give free pages beyond `keep_pages` back to the driver; bytes given back."""
        count = 0
        while True:
            with self._lock:
                if len(self._free) <= keep_pages:
                    return count * self.page_bytes
                handle = self._free.pop()
            self._driver.release(handle)
            count += 1
