"""Which idle models leave memory so that another fits: least value per byte first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_PRIORITY_DOUBLES = 10  # so many steps of priority are worth twice as much


@dataclass(frozen=True)
class Candidate:
    """A group that may be parked: not pinned, nothing in flight."""

    group_id: int
    freed_bytes: Mapping[int, int]  # by rank
    idle_s: float
    priority: int
    wake_s: float  # what it costs to have it back

    @property
    def value_per_byte(self) -> float:
        """What keeping it saves: the cost of its wake, at the rate at which its next request is to be expected (the longer it
        is idle, the later), weighed by priority; over the bytes that it takes for that."""
        weight = 2.0 ** (self.priority / _PRIORITY_DOUBLES)
        return weight * self.wake_s / (1.0 + self.idle_s) / max(sum(self.freed_bytes.values()), 1)


def choose(candidates: Iterable[Candidate], missing_bytes: Mapping[int, int]) -> tuple[int, ...] | None:
    """The groups to park so that every rank has its missing bytes; None when all of them would not do. () when none is missing.

    Cheapest first; then those that turn out not to be needed stay, the most valuable ones first.
    """
    chosen: list[Candidate] = []
    left = {rank: size for rank, size in missing_bytes.items() if size > 0}
    for candidate in sorted(candidates, key=lambda candidate: (candidate.value_per_byte, candidate.group_id)):
        if not _short(left, chosen):
            break
        if any(candidate.freed_bytes.get(rank, 0) > 0 for rank in _short(left, chosen)):
            chosen.append(candidate)
    if _short(left, chosen):
        return None
    for candidate in list(reversed(chosen)):
        rest = [other for other in chosen if other is not candidate]
        if not _short(left, rest):
            chosen = rest
    return tuple(candidate.group_id for candidate in chosen)


def _short(missing: Mapping[int, int], chosen: Iterable[Candidate]) -> set[int]:
    gone = list(chosen)
    return {rank for rank, size in missing.items() if size > sum(candidate.freed_bytes.get(rank, 0) for candidate in gone)}
