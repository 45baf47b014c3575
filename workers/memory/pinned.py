"""Host memory that GPUs copy from at the full speed of the link: pinned once, in pages that parked models come and go through.

Pinning is slow (about half a second a GiB on one thread, most of it the kernel finding and clearing the pages), so slabs are
populated and registered on several threads, in huge pages where the kernel has them, and kept until the pool closes.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

SLAB_BYTES = 512 * 2**20
PIN_THREADS = 8
HUGE_PAGE_BYTES = 2 * 2**20
MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it yet

_libc = ctypes.CDLL(None, use_errno=True)  # Calls through it release the interpreter lock, the mmap module's do not
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True)
class HostPage:
    """One page of pinned memory: its address, and its bytes as a CPU tensor."""

    address: int
    bytes: torch.Tensor


class PinnedPool:
    """At most `capacity_bytes` of pinned memory in pages of `page_bytes`. Any thread may call.

    `pin` and `unpin` are `CudaDriver`'s; `prepare` binds a pinning thread to the GPU.
    """

    def __init__(
        self,
        capacity_bytes: int,
        page_bytes: int,
        pin: Callable[[int, int], None],
        unpin: Callable[[int], None],
        prepare: Callable[[], None],
        *,
        slab_bytes: int = SLAB_BYTES,
        threads: int = PIN_THREADS,
    ) -> None:
        if slab_bytes % page_bytes:
            raise ValueError(f"slab of {slab_bytes} bytes is not whole pages of {page_bytes}")
        self.page_bytes = page_bytes
        self.capacity_bytes = capacity_bytes // slab_bytes * slab_bytes
        self._slab_bytes = slab_bytes
        self._threads = threads
        self._pin, self._unpin, self._prepare = pin, unpin, prepare
        self._slabs: list[_Slab] = []
        self._free: list[HostPage] = []
        self._lock = threading.Lock()
        self._closed = False

    @property
    def pinned_bytes(self) -> int:
        return len(self._slabs) * self._slab_bytes

    @property
    def free_bytes(self) -> int:
        """Pinned already and used by nobody."""
        return len(self._free) * self.page_bytes

    def take(self, count: int) -> list[HostPage]:
        """`count` pages, pinning more memory where the free ones do not suffice. MemoryError takes none."""
        with self._lock:
            self._grow(count)
            kept = len(self._free) - count
            taken = self._free[kept:]
            del self._free[kept:]
            return taken

    def give(self, pages: list[HostPage]) -> None:
        with self._lock:
            self._free.extend(pages)

    def warm(self, size_bytes: int) -> None:
        """Pin ahead, so that `size_bytes` can be taken without waiting."""
        with self._lock:
            self._grow(-(-size_bytes // self.page_bytes))

    def pin_ahead(self, size_bytes: int) -> None:
        """Pin slab by slab until `size_bytes` are, on the caller's thread and beside whoever takes pages meanwhile, so that the
        first parks need not wait for it."""
        self._prepare()
        while not self._closed and self.pinned_bytes + self._slab_bytes <= min(size_bytes, self.capacity_bytes):
            slab = self._new_slab()
            with self._lock:
                if self._closed or self.pinned_bytes + self._slab_bytes > self.capacity_bytes:
                    self._unpin(slab.address)
                    return
                self._keep(slab)

    def close(self) -> None:
        """Unpin everything. ValueError while a page is out."""
        with self._lock:
            if self.free_bytes != self.pinned_bytes:
                raise ValueError(f"{self.pinned_bytes - self.free_bytes} bytes of pinned memory are still in use")
            self._closed = True
            self._free.clear()
            while self._slabs:
                self._unpin(self._slabs.pop().address)

    def _grow(self, count: int) -> None:
        lacking = (count - len(self._free)) * self.page_bytes
        slabs = -(-lacking // self._slab_bytes)
        if slabs <= 0:
            return
        if self.pinned_bytes + slabs * self._slab_bytes > self.capacity_bytes:
            room = self.capacity_bytes - self.pinned_bytes + self.free_bytes
            raise MemoryError(
                f"{count * self.page_bytes} bytes of pinned host memory asked, {room} of {self.capacity_bytes} are free;"
                " drop the host copy of another model or raise the limit"
            )
        with ThreadPoolExecutor(self._threads, "pin", initializer=self._prepare) as pool:
            futures = [pool.submit(self._new_slab) for _ in range(slabs)]
        try:
            made = [future.result() for future in futures]
        except BaseException:
            for future in futures:
                if future.exception() is None:
                    self._unpin(future.result().address)
            raise
        for slab in made:
            self._keep(slab)

    def _keep(self, slab: _Slab) -> None:
        self._slabs.append(slab)
        for start in range(0, self._slab_bytes, self.page_bytes):
            view = slab.bytes[start : start + self.page_bytes]
            self._free.append(HostPage(slab.address + start, view))

    def _new_slab(self) -> _Slab:
        slab = _Slab(self._slab_bytes)
        self._pin(slab.address, self._slab_bytes)
        return slab


class _Slab:
    """Anonymous memory, every page of it present."""

    def __init__(self, size_bytes: int) -> None:
        self._map = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        skip = -whole.data_ptr() % HUGE_PAGE_BYTES
        self.bytes = whole[skip : skip + size_bytes]
        self.address = self.bytes.data_ptr()
        _libc.madvise(self.address, size_bytes, mmap.MADV_HUGEPAGE)  # A wish: kernels without huge pages refuse it
        if _libc.madvise(self.address, size_bytes, MADV_POPULATE_WRITE):
            ctypes.memset(self.address, 0, size_bytes)  # An older kernel
