"""Who holds how many bytes on which rank. Pure: no clock, no I/O, one writer (the pool driver, rule 1).

Memory is entered here before it is mapped, on all ranks or on none (rule 3). A line is (owner, kind); an owner is one worker
group, so that two groups of one model, the old and the new generation, stay apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shortage:
    rank: int
    asked_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.asked_bytes / 2**20:.1f} MiB asked, {max(self.free_bytes, 0) / 2**20:.1f} MiB free"


class LedgerFull(Exception):
    """Nothing was reserved. `shortages` has one entry for each rank that lacks room."""

    def __init__(self, owner: Hashable, kind: str, shortages: Sequence[Shortage]) -> None:
        super().__init__(f"{owner} {kind}: " + "; ".join(str(shortage) for shortage in shortages))
        self.shortages = tuple(shortages)


class Ledger:
    """Bytes by rank, owner and kind, never above a rank's capacity except by `record` of what was measured."""

    def __init__(self, capacities: Sequence[int]) -> None:
        if any(capacity < 0 for capacity in capacities):
            raise ValueError("a capacity below 0 bytes")
        self._capacities = list(capacities)
        self._lines: list[dict[tuple[Hashable, str], int]] = [{} for _ in capacities]
        self._used = [0 for _ in capacities]

    @property
    def ranks(self) -> int:
        return len(self._capacities)

    def capacity(self, rank: int) -> int:
        return self._capacities[rank]

    def set_capacity(self, rank: int, capacity_bytes: int) -> None:
        """As the device turned out to be. What is held stays, even above it."""
        _check_size(capacity_bytes)
        self._capacities[rank] = capacity_bytes

    def used(self, rank: int) -> int:
        return self._used[rank]

    def free(self, rank: int) -> int:
        """Below 0 where more was measured than reserved; nothing more can be reserved there then."""
        return self._capacities[rank] - self._used[rank]

    def held(self, owner: Hashable, kind: str) -> dict[int, int]:
        """Bytes by rank of one line, ranks without it left out."""
        return {rank: lines[owner, kind] for rank, lines in enumerate(self._lines) if (owner, kind) in lines}

    def lines(self, rank: int) -> tuple[tuple[Hashable, str, int], ...]:
        return tuple((owner, kind, size) for (owner, kind), size in self._lines[rank].items())

    def of_owner(self, owner: Hashable) -> dict[int, int]:
        """Bytes by rank of all lines of an owner, ranks without any left out."""
        sums: dict[int, int] = {}
        for rank, lines in enumerate(self._lines):
            for (holder, _), size in lines.items():
                if holder == owner:
                    sums[rank] = sums.get(rank, 0) + size
        return sums

    def owners(self) -> set[Hashable]:
        return {owner for lines in self._lines for owner, _ in lines}

    def reserve(self, owner: Hashable, wanted: Mapping[int, Mapping[str, int]]) -> None:
        """New lines (rank -> kind -> bytes), all or none. LedgerFull when a rank lacks room; ValueError for a known line."""
        for rank, kinds in wanted.items():
            for kind, size in kinds.items():
                _check_size(size)
                if (owner, kind) in self._lines[rank]:
                    raise ValueError(f"rank {rank} already has a line for {owner} {kind}; use resize")
        totals = {rank: sum(kinds.values()) for rank, kinds in wanted.items()}
        self._require(owner, "+".join(sorted({kind for kinds in wanted.values() for kind in kinds})), totals)
        for rank, kinds in wanted.items():
            for kind, size in kinds.items():
                self._set(rank, owner, kind, size)

    def resize(self, owner: Hashable, kind: str, sizes: Mapping[int, int]) -> None:
        """Set lines to new sizes, all or none. Growing may raise LedgerFull; shrinking never does."""
        for size in sizes.values():
            _check_size(size)
        growth = {rank: size - self._lines[rank].get((owner, kind), 0) for rank, size in sizes.items()}
        self._require(owner, kind, {rank: more for rank, more in growth.items() if more > 0})
        for rank, size in sizes.items():
            self._set(rank, owner, kind, size)

    def record(self, owner: Hashable, rank: int, measured: Mapping[str, int]) -> None:
        """Replace all lines of an owner on a rank by what was measured there. Reality is entered even above capacity."""
        for key in [key for key in self._lines[rank] if key[0] == owner]:
            self._drop(rank, key)
        for kind, size in measured.items():
            _check_size(size)
            self._set(rank, owner, kind, size)

    def release(self, owner: Hashable) -> dict[int, int]:
        """Remove all lines of an owner; bytes freed by rank. Nothing to remove is no error."""
        freed: dict[int, int] = {}
        for rank, lines in enumerate(self._lines):
            for key in [key for key in lines if key[0] == owner]:
                freed[rank] = freed.get(rank, 0) + self._drop(rank, key)
        return freed

    def check(self) -> None:
        """AssertionError when the totals do not match the lines."""
        for rank, lines in enumerate(self._lines):
            total = sum(lines.values())
            assert total == self._used[rank], f"rank {rank}: lines hold {total} bytes, total says {self._used[rank]}"
            assert all(size >= 0 for size in lines.values()), f"rank {rank}: a line below 0 bytes"

    def _require(self, owner: Hashable, kind: str, more: Mapping[int, int]) -> None:
        shortages = [Shortage(rank, size, self.free(rank)) for rank, size in more.items() if size > self.free(rank)]
        if shortages:
            raise LedgerFull(owner, kind, shortages)

    def _set(self, rank: int, owner: Hashable, kind: str, size: int) -> None:
        self._used[rank] += size - self._lines[rank].get((owner, kind), 0)
        self._lines[rank][owner, kind] = size

    def _drop(self, rank: int, key: tuple[Hashable, str]) -> int:
        size = self._lines[rank].pop(key)
        self._used[rank] -= size
        return size


def _check_size(size: int) -> None:
    if size < 0:
        raise ValueError(f"{size} bytes")
