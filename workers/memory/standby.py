"""A model's weights, here or standing by: `park` takes their pages away, `wake` brings them back to the same addresses.

The copies they come back from are pinned host memory or spare memory of a peer GPU. Weights do not change, so a copy made once
stays good and parking costs only the unmapping. One thread at a time calls (lifecycle operations of a model are serial, rule 5).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from workers.memory.copy_engine import Chunk, CopyEngine, Link, Transfer
from workers.memory.cuda_arena import CudaArena, CudaRegion
from workers.memory.pinned import PinnedPool

State = Literal["resident", "parked", "waking"]
MAP_PAGES = 4
"""Pages mapped at once during a wake: the copy runs while the next ones are mapped."""


class ParkedCopy(ABC):
    """A second place of a region's bytes, page for page."""

    def __init__(self, size_bytes: int, page_bytes: int, addresses: Sequence[int], in_link: Link, out_link: Link) -> None:
        self.size_bytes = size_bytes
        self.page_bytes = page_bytes
        self.addresses = addresses
        self.in_link: Link = in_link
        self.out_link: Link = out_link
        self._complete = False
        self._filling: Transfer | None = None

    @property
    def complete(self) -> bool:
        """True once every byte is there."""
        if self._filling is not None and self._filling.over:
            self._complete, self._filling = not self._filling.failed, None
        return self._complete

    @property
    def filling(self) -> bool:
        return not self.complete and self._filling is not None

    def fill(self, transfer: Transfer) -> None:
        """The transfer that makes it complete."""
        self._filling = transfer

    def declare_complete(self) -> None:
        """All bytes were written by other means (`HostCopy.write`)."""
        self._complete = True

    def settle(self, timeout_s: float) -> None:
        """Wait for a transfer that is filling it."""
        if self.filling and self._filling is not None:
            self._filling.wait(timeout_s)

    @abstractmethod
    def close(self) -> None:
        """Give its memory back."""


class HostCopy(ParkedCopy):
    """In pinned host memory."""

    def __init__(self, pinned: PinnedPool, size_bytes: int) -> None:
        self._pinned = pinned
        self._pages = pinned.take(-(-size_bytes // pinned.page_bytes))
        super().__init__(size_bytes, pinned.page_bytes, [page.address for page in self._pages], "host_in", "host_out")

    def write(self, offset_bytes: int, source: torch.Tensor) -> None:
        """Bytes of a CPU tensor to their place, as when a checkpoint is read. ValueError where they do not fit."""
        remaining = source.contiguous().view(-1).view(torch.uint8)
        if offset_bytes + remaining.numel() > self.size_bytes:
            raise ValueError(f"{remaining.numel()} bytes at {offset_bytes} do not fit a copy of {self.size_bytes}")
        while remaining.numel():
            page, start = divmod(offset_bytes, self.page_bytes)
            count = min(remaining.numel(), self.page_bytes - start)
            self._pages[page].bytes[start : start + count].copy_(remaining[:count])
            remaining = remaining[count:]
            offset_bytes += count

    def close(self) -> None:
        self._pinned.give(self._pages)
        self._pages = []


class PeerCopy(ParkedCopy):
    """In memory of a peer GPU, taken from that GPU's pool like anything else there."""

    def __init__(self, peer: CudaArena, name: str, size_bytes: int) -> None:
        self._region = peer.reserve(name, size_bytes)
        try:
            self._region.commit(size_bytes)
        except BaseException:
            self._region.close()
            raise
        page_bytes = self._region.page_bytes
        addresses = range(self._region.address, self._region.address + self._region.committed_bytes, page_bytes)
        super().__init__(size_bytes, page_bytes, addresses, "peer", "peer")

    def close(self) -> None:
        self._region.close()


class Standby:
    """Parks and wakes one region. Mark i of a wake is layer i: its bytes end at `layer_ends[i]`, in the order of use."""

    def __init__(self, region: CudaRegion, size_bytes: int, layer_ends: Sequence[int], engine: CopyEngine) -> None:
        self.region = region
        self.size_bytes = size_bytes
        self.copies: list[ParkedCopy] = []
        self._engine = engine
        self._pages = -(-size_bytes // region.page_bytes)
        self._marks = [-(-end // region.page_bytes) for end in layer_ends]
        self._wake: Transfer | None = None

    @property
    def state(self) -> State:
        if self._wake is not None and self._wake.over:
            self._wake = None
        if self._wake is not None:
            return "waking"
        return "resident" if self.region.committed_bytes else "parked"

    def save(self, copy: ParkedCopy) -> Transfer:
        """Start filling `copy` from the resident weights and keep it from now on."""
        self._require("resident", "saved")
        self._check_fits(copy)
        name = f"save {self.region.name}"
        transfer = Transfer(name, copy.out_link, self._outward(copy), self._pages, self._marks, undo=_nothing)
        self._engine.submit(transfer)
        copy.fill(transfer)
        self.copies.append(copy)
        return transfer

    def adopt(self, copy: ParkedCopy) -> None:
        """Keep a copy that was filled by other means. A cold load reads the checkpoint into one and wakes from it."""
        self._check_fits(copy)
        if not copy.complete:
            raise ValueError(f"{self.region.name}: a copy that is not complete cannot be adopted")
        self.copies.append(copy)

    def park(self) -> None:
        """Take the pages away. The caller has waited for the model's work (rule 5). ValueError without a complete copy."""
        self._require("resident", "parked")
        if any(copy.filling for copy in self.copies):
            raise ValueError(f"{self.region.name} cannot be parked while it is being saved; wait for the transfer")
        if not any(copy.complete for copy in self.copies):
            raise ValueError(f"{self.region.name} cannot be parked: no complete copy of it exists; save it first")
        self.region.decommit_range(0, self.region.reserved_bytes)

    def wake(self) -> Transfer:
        """Take pages and start copying into them, from a peer GPU where there is such a copy, else from the host.

        MemoryError changes nothing; an error later undoes all of it and reaches whoever waits for the transfer.
        """
        self._require("parked", "woken")
        complete = [copy for copy in self.copies if copy.complete]
        if not complete:
            raise ValueError(f"{self.region.name} cannot be woken: no complete copy of it exists; load it into one first")
        copy = min(complete, key=lambda each: each.in_link != "peer")
        handles = self.region.arena.pages.take(self._pages, self.region.name)

        def undo() -> None:
            placed = self.region.committed_bytes // self.region.page_bytes
            if placed:
                self.region.lift(0, placed)
            self.region.arena.pages.give(handles)

        name = f"wake {self.region.name}"
        transfer = Transfer(name, copy.in_link, self._inward(copy, handles), self._pages, self._marks, undo)
        try:
            self._engine.submit(transfer)
        except ValueError:
            undo()
            raise
        self._wake = transfer
        return transfer

    def drop(self, copy: ParkedCopy, timeout_s: float) -> None:
        """Give a copy up. ValueError while a wake runs, and for the last copy of a parked model."""
        copy.settle(timeout_s)
        others = any(other.complete for other in self.copies if other is not copy)
        if self.state == "waking" or (self.state == "parked" and not others):
            raise ValueError(f"{self.region.name} is {self.state} and needs this copy; wake it first")
        self.copies.remove(copy)
        copy.close()

    def close(self, timeout_s: float) -> None:
        """Wait for what is under way, give all copies up and close the region."""
        if self._wake is not None and not self._wake.over:
            self._wake.wait(timeout_s)
        for copy in self.copies:
            copy.settle(timeout_s)
            copy.close()
        self.copies.clear()
        self.region.close()

    def _inward(self, copy: ParkedCopy, handles: list[int]) -> Iterator[Chunk]:
        """Maps a few pages, then hands out the chunks that fill them."""
        for first in range(0, self._pages, MAP_PAGES):
            group = handles[first : first + MAP_PAGES]
            self.region.place(first, group)
            self.region.used_bytes = min(self.size_bytes, self.region.committed_bytes)
            for page in range(first, first + len(group)):
                yield Chunk(self._address(page), copy.addresses[page], self._bytes_of(page))

    def _outward(self, copy: ParkedCopy) -> Iterator[Chunk]:
        for page in range(self._pages):
            yield Chunk(copy.addresses[page], self._address(page), self._bytes_of(page))

    def _check_fits(self, copy: ParkedCopy) -> None:
        if (copy.size_bytes, copy.page_bytes) != (self.size_bytes, self.region.page_bytes):
            raise ValueError(
                f"{self.region.name}: {self.size_bytes} bytes in pages of {self.region.page_bytes} do not match a copy of"
                f" {copy.size_bytes} bytes in pages of {copy.page_bytes}"
            )

    def _address(self, page: int) -> int:
        return self.region.address + page * self.region.page_bytes

    def _bytes_of(self, page: int) -> int:
        return min(self.region.page_bytes, self.size_bytes - page * self.region.page_bytes)

    def _require(self, state: State, verb: str) -> None:
        if self.state != state:
            raise ValueError(f"{self.region.name} is {self.state}; it must be {state} to be {verb}")


def _nothing() -> None:
    """Undoing a save: the copy is simply not complete."""
