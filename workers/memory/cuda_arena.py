"""Memory of one GPU as address ranges whose physical pages come and go (see `arena` for the protocol).

A region's addresses are reserved once and stay: tensors into it and CUDA graphs that use them survive while its pages are taken
away and others put back. Weights and KV of all models draw on one `PagePool`. Before pages are taken from under a range, the
caller has waited for the work that uses it: an access to a range without pages ends the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from workers.memory.cuda_driver import CudaDriver
from workers.memory.page_pool import PageDriver, PagePool

# Mapping costs time per page and waste grows with the page: 32 MiB keeps both low (ops/bench/pool.py measures other sizes).
PAGE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class MemoryReport:
    """The arena's own count beside the driver's. All in bytes."""

    capacity_bytes: int
    committed_bytes: int
    used_bytes: int
    kept_bytes: int  # Pages nobody has, kept for the next who asks
    total_bytes: int
    free_bytes: int  # By the driver, all processes counted
    torch_bytes: int  # Held by torch's own allocator: workspaces, activations, graphs
    other_bytes: int  # The rest: contexts, collectives, other processes
    unexplained_bytes: int  # How much `other_bytes` has grown since the arena began

    @property
    def fragmentation(self) -> float:
        """Share of the committed bytes that nobody uses."""
        return (self.committed_bytes - self.used_bytes) / self.committed_bytes if self.committed_bytes else 0.0


@dataclass(frozen=True)
class Released:
    """What `trim` gave back, by count and by the driver's figure: freed bytes are measured, not assumed (rule 3)."""

    counted_bytes: int
    measured_bytes: int


class CudaRegion:
    """Used by one thread at a time."""

    def __init__(self, arena: CudaArena, name: str, size_bytes: int) -> None:
        page_bytes = arena.pages.page_bytes
        self.arena = arena
        self.name = name
        self.page_bytes = page_bytes
        self.reserved_bytes = -(-max(size_bytes, 1) // page_bytes) * page_bytes
        self.committed_bytes = 0
        self.used_bytes = 0
        self.address = arena.driver.reserve(self.reserved_bytes, page_bytes)
        self._handles: list[int | None] = [None] * (self.reserved_bytes // page_bytes)
        self._storage = arena.driver.storage(self.address, self.reserved_bytes)
        with torch.inference_mode(False):  # Else nobody could write to it outside of inference mode
            empty = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
            self._bytes = empty.set_(self._storage, 0, (self.reserved_bytes,), (1,))

    def commit(self, size_bytes: int) -> None:
        """Bytes 0..size become usable, those beyond are given back. Both at once need room for both."""
        self.commit_range(0, size_bytes)
        self.decommit_range(-(-size_bytes // self.page_bytes) * self.page_bytes, self.reserved_bytes)
        self.used_bytes = size_bytes

    def commit_range(self, start_bytes: int, end_bytes: int) -> None:
        """Every page that touches bytes start..end becomes usable. MemoryError or CudaError change nothing."""
        if not 0 <= start_bytes <= end_bytes:
            raise ValueError(f"region {self.name}: bytes {start_bytes}..{end_bytes} are no range")
        if end_bytes > self.reserved_bytes:
            raise MemoryError(f"region {self.name}: bytes {start_bytes}..{end_bytes} asked, {self.reserved_bytes} reserved")
        slots = range(start_bytes // self.page_bytes, -(-end_bytes // self.page_bytes)) if end_bytes > start_bytes else range(0)
        missing = [slot for slot in slots if self._handles[slot] is None]
        handles = self.arena.pages.take(len(missing), self.name)
        placed: list[range] = []
        try:
            for run in _runs(missing):
                done = sum(len(earlier) for earlier in placed)
                self.place(run.start, handles[done : done + len(run)])
                placed.append(run)
        except BaseException:
            for run in placed:
                self.lift(run.start, len(run))
            self.arena.pages.give(handles)
            raise
        self.used_bytes = self.committed_bytes

    def decommit_range(self, start_bytes: int, end_bytes: int) -> None:
        """Every whole page within bytes start..end is given back. The work that used them is over."""
        first = -(-start_bytes // self.page_bytes)
        held = [slot for slot in range(first, end_bytes // self.page_bytes) if self._handles[slot] is not None]
        for run in _runs(held):
            self.arena.pages.give(self.lift(run.start, len(run)))

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset_bytes: int = 0) -> torch.Tensor:
        """A view of the reserved range; touch only what is committed."""
        count = 1
        for dimension in shape:
            count *= dimension
        end = offset_bytes + count * dtype.itemsize
        if end > self.reserved_bytes:
            raise ValueError(f"region {self.name}: a view ends at byte {end}, {self.reserved_bytes} are reserved")
        return self._bytes[offset_bytes:end].view(dtype).view(shape)

    def place(self, slot: int, handles: list[int]) -> None:
        """Map pages taken from the pool from `slot` on. An error maps none; they stay the caller's either way until mapped."""
        start = self.address + slot * self.page_bytes
        mapped = 0
        try:
            for handle in handles:
                self.arena.driver.map(start + mapped * self.page_bytes, self.page_bytes, handle)
                mapped += 1
            self.arena.driver.grant(start, mapped * self.page_bytes)
        except BaseException:
            if mapped:
                self.arena.driver.unmap(start, mapped * self.page_bytes)
            raise
        self._handles[slot : slot + mapped] = handles
        self.committed_bytes += mapped * self.page_bytes

    def lift(self, slot: int, count: int) -> list[int]:
        """Unmap the pages of slots slot..slot+count; their handles, which the caller gives to the pool or places elsewhere."""
        handles = [handle for handle in self._handles[slot : slot + count] if handle is not None]
        if len(handles) != count:
            raise ValueError(f"region {self.name}: {count - len(handles)} of pages {slot}..{slot + count} are not there")
        self.arena.driver.unmap(self.address + slot * self.page_bytes, count * self.page_bytes)
        self._handles[slot : slot + count] = [None] * count
        self.committed_bytes -= count * self.page_bytes
        self.used_bytes = min(self.used_bytes, self.committed_bytes)
        return handles

    def close(self) -> None:
        """Pages go back at once; the address range goes once the last tensor into it has."""
        self.commit(0)
        reference = StorageWeakRef(self._storage)
        del self._bytes, self._storage
        self.arena.forget(self.name, _Retired(self.address, self.reserved_bytes, reference))


@dataclass(frozen=True)
class _Retired:
    """An address range whose region is closed but which tensors may still point into."""

    address: int
    size_bytes: int
    storage: StorageWeakRef


class CudaArena:
    """All memory the pool has on one GPU. `capacity_bytes` is a hard limit on what is committed, in whole pages.

    `peers` are the GPUs of this process that may access what is mapped here (peer standby, split wake).
    """

    def __init__(
        self,
        device: int,
        capacity_bytes: int,
        *,
        page_bytes: int = PAGE_BYTES,
        peers: tuple[int, ...] = (),
        driver: PageDriver | None = None,
    ) -> None:
        self.device = device
        self.driver = driver if driver is not None else CudaDriver(device, peers)
        self.pages = PagePool(self.driver, capacity_bytes, page_bytes)
        self.capacity_bytes = self.pages.capacity_pages * page_bytes
        self._regions: dict[str, CudaRegion] = {}
        self._retired: list[_Retired] = []
        self._other_at_start = 0
        self._other_at_start = self.report().other_bytes

    @property
    def committed_bytes(self) -> int:
        """Bytes lent to regions, those of a wake under way included."""
        return self.pages.lent * self.pages.page_bytes

    def reserve(self, name: str, size_bytes: int) -> CudaRegion:
        if name in self._regions:
            raise ValueError(f"region {name} exists")
        self._free_retired()
        region = CudaRegion(self, name, size_bytes)
        self._regions[name] = region
        return region

    def regions(self) -> dict[str, int]:
        return {name: region.committed_bytes for name, region in self._regions.items()}

    def trim(self, keep_bytes: int = 0) -> Released:
        """Give kept pages beyond `keep_bytes` back to the driver."""
        self._free_retired()
        before, _ = self.driver.memory_info()
        counted = self.pages.trim(keep_bytes // self.pages.page_bytes)
        after, _ = self.driver.memory_info()
        return Released(counted, after - before)

    def leave_free(self, size_bytes: int) -> None:
        """Give kept pages back to the driver while the GPU has less than `size_bytes` left for what is not ours to place."""
        free, _ = self.driver.memory_info()
        if free < size_bytes and self.pages.free_pages:
            self.pages.trim(max(0, self.pages.free_pages - -(-(size_bytes - free) // self.pages.page_bytes)))

    def report(self) -> MemoryReport:
        free, total = self.driver.memory_info()
        torch_bytes = self.driver.allocator_bytes()
        other = total - free - self.pages.held_bytes - torch_bytes
        return MemoryReport(
            capacity_bytes=self.capacity_bytes,
            committed_bytes=self.committed_bytes,
            used_bytes=sum(region.used_bytes for region in self._regions.values()),
            kept_bytes=self.pages.free_pages * self.pages.page_bytes,
            total_bytes=total,
            free_bytes=free,
            torch_bytes=torch_bytes,
            other_bytes=other,
            unexplained_bytes=other - self._other_at_start,
        )

    def check(self) -> None:
        """AssertionError unless pages, regions and capacity agree. Not while a wake is under way."""
        committed = sum(self.regions().values())
        assert committed == self.committed_bytes, f"{self.committed_bytes} bytes lent, {committed} mapped"
        assert committed <= self.capacity_bytes, f"{committed} bytes mapped of {self.capacity_bytes}"
        for region in self._regions.values():
            assert region.used_bytes <= region.committed_bytes, f"region {region.name} uses more than it has"

    def close(self) -> None:
        """Close every region and give all memory back."""
        for region in list(self._regions.values()):
            region.close()
        self.trim()

    def forget(self, name: str, retired: _Retired) -> None:
        """Called by regions."""
        del self._regions[name]
        self._retired.append(retired)
        self._free_retired()

    def _free_retired(self) -> None:
        retired, self._retired = self._retired, []
        for each in retired:
            if each.storage.expired():
                self.driver.free_range(each.address, each.size_bytes)
            else:
                self._retired.append(each)


def _runs(slots: Iterable[int]) -> Iterator[range]:
    """Ascending slots as maximal contiguous ranges."""
    start = end = -1
    for slot in slots:
        if slot == end:
            end += 1
            continue
        if end > start:
            yield range(start, end)
        start, end = slot, slot + 1
    if end > start:
        yield range(start, end)
