"""Which idle models leave memory so that another fits: least value per byte first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

TURN_S = 2.0
"""For so long a request waits for idle models to leave; then busy ones take turns."""
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


@dataclass(frozen=True)
class Resident:
    """A group in memory that may be parked at all: its spec and its engine allow it."""

    group_id: int
    bytes: Mapping[int, int]  # by rank
    quiet: bool  # nothing in flight
    idle_s: float  # since its last request, or since it came
    ready_s: float  # since it came
    priority: int
    keep_warm_s: float
    wake_s: float


@dataclass(frozen=True)
class Wanting:
    """The group that needs memory."""

    priority: int
    asked: bool  # somebody waits for it, or an operator asked for it
    waited_s: float  # the longest of those who wait


def make_room(residents: Iterable[Resident], wanting: Wanting, missing_bytes: Mapping[int, int]) -> tuple[int, ...] | None:
    """The groups that have to leave; None when all that may would not do.

    1. Quiet groups, but those kept warm only for higher priority; where nobody waits, none of higher priority.
    2. When that is not enough and somebody has waited for `TURN_S`: busy ones too, of no higher priority, that had as long.
    """
    residents = list(residents)
    chosen = choose(_candidates(residents, wanting, busy=False), missing_bytes)
    if chosen is None and wanting.waited_s >= TURN_S:
        chosen = choose(_candidates(residents, wanting, busy=True), missing_bytes)
    return chosen


def _candidates(residents: Iterable[Resident], wanting: Wanting, *, busy: bool) -> Iterable[Candidate]:
    for each in residents:
        if not wanting.asked and each.priority > wanting.priority:
            continue  # what is worth more stays
        if not each.quiet and (not busy or each.priority > wanting.priority or each.ready_s < TURN_S):
            continue
        if each.quiet and each.idle_s < each.keep_warm_s and wanting.priority <= each.priority:
            continue
        yield Candidate(each.group_id, each.bytes, each.idle_s if each.quiet else 0.0, each.priority, each.wake_s)


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
