"""Making room for a wide model by moving others: an island of N devices in one domain, with as few moves as can be.

    1. For every domain and every choice of N of its devices: the fewest groups whose leaving frees enough on each (Filter).
    2. The cheapest choices first, by moves, then bytes (Score): try to place the groups that must leave elsewhere, with the
       island reserved, by the same packing that places everything else.
    3. The first choice whose groups all find a place wins (Reserve); none: no room can be made.

Pinned and busy models stay where they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb

from placement.evictions import fewest_evictions
from placement.footprint import group_footprint
from placement.free_memory import Domain, FreeMemory
from placement.packing import Packer
from placement.scoring import CONSOLIDATE
from placement.transfer import transfer_s
from placement.types import ModelRequest, PlacedGroup, Snapshot

_CHOICES_IN_DOMAIN = 70  # all of 8 devices; of wider domains, neighbours only
_TRIALS = 200


@dataclass(frozen=True)
class Move:
    before: PlacedGroup
    after: PlacedGroup
    bytes: int
    seconds: float  # load at the new place from disk; the old one serves until then


@dataclass(frozen=True)
class Room:
    """What makes room: first the moves, then `group` can be loaded."""

    group: PlacedGroup
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class _Choice:
    moves: int
    bytes: int
    index: int  # of the domain
    ranks: tuple[int, ...]
    pool: str
    evicted: tuple[PlacedGroup, ...]


def make_room(snapshot: Snapshot, request: ModelRequest, degree: int, busy: Collection[str] = ()) -> Room | None:
    """Room for one more group of `request` at tensor parallel `degree`; with no moves where it fits as it is.

    `busy` names models that must not move now. None when no room can be made by moving each group at most once.
    """
    requests = {model.name: model for model in snapshot.models}
    stay = {name for name, model in requests.items() if model.pinned} | set(busy) | {request.name}
    free = _free_after(snapshot)
    for choice in sorted(_choices(snapshot, request, degree, stay, free), key=_cost)[:_TRIALS]:
        kind = free.domains[choice.index].kind
        need = group_footprint(request, degree, 1, kind)[0].total
        island = PlacedGroup(request.name, choice.pool, choice.ranks, degree, 1, (need,) * degree)
        moves = _move_away(snapshot, request, island, choice.evicted)
        if moves is not None:
            return Room(island, moves)
    return None


def largest_island(snapshot: Snapshot, need_bytes: int) -> int:
    """The most devices of one domain that have so much free, each."""
    free = _free_after(snapshot)
    return max((domain.fitting(need_bytes) for domain in free.domains), default=0)


def _choices(
    snapshot: Snapshot, request: ModelRequest, degree: int, stay: Collection[str], free: FreeMemory
) -> Iterator[_Choice]:
    groups_on: dict[tuple[str, int], list[PlacedGroup]] = {}
    for group in sorted(snapshot.placed, key=lambda group: (group.model, group.pool, group.ranks)):
        for rank in group.ranks:
            groups_on.setdefault((group.pool, rank), []).append(group)
    capacity = {(device.pool, device.rank): device.capacity_bytes - device.foreign_bytes for device in snapshot.devices}
    for domain in free.domains:
        pool = domain.key[0]
        if (request.pools and pool not in request.pools) or request.device not in (None, domain.kind):
            continue
        need = group_footprint(request, degree, 1, domain.kind)[0].total
        able = [(rank, amount) for amount, rank in _by_rank(domain) if capacity[pool, rank] >= need]
        for chosen in _subsets(able, degree):
            lacks = {rank: need - amount for rank, amount in chosen if amount < need}
            leaving = fewest_evictions(lacks, {rank: groups_on.get((pool, rank), []) for rank in lacks}, stay)
            if leaving is not None:
                size = sum(sum(group.bytes_per_rank) for group in leaving)
                ranks = tuple(rank for rank, _ in chosen)
                yield _Choice(len(leaving), size, domain.index, ranks, pool, leaving)


def _subsets(able: list[tuple[int, int]], degree: int) -> Iterable[tuple[tuple[int, int], ...]]:
    if comb(len(able), degree) <= _CHOICES_IN_DOMAIN:
        return combinations(able, degree)
    return (tuple(able[first : first + degree]) for first in range(len(able) - degree + 1))


def _move_away(
    snapshot: Snapshot, request: ModelRequest, island: PlacedGroup, evicted: tuple[PlacedGroup, ...]
) -> tuple[Move, ...] | None:
    if not evicted:
        return ()
    left = Counter(snapshot.placed) - Counter(evicted)
    counts = Counter(group.model for group in snapshot.placed)
    # As many groups as there are now, no more: whatever else lacks a place is not this plan's to give one.
    models = [replace(model, replicas=counts[model.name]) for model in snapshot.models if model.name != request.name]
    models.append(replace(request, replicas=counts[request.name] + 1, tensor_parallel=None, pipeline_parallel=None))
    trial = Snapshot(snapshot.devices, tuple(models), (*left.elements(), island))
    plan = Packer(trial, CONSOLIDATE).plan()
    if plan.refusals or plan.unloads:
        return None
    arrivals: dict[str, list[PlacedGroup]] = {}
    for group in plan.loads:
        arrivals.setdefault(group.model, []).append(group)
    kinds = {(device.pool, device.rank): device.kind for device in snapshot.devices}
    return tuple(_move(before, arrivals[before.model].pop(0), kinds) for before in evicted)


def _move(before: PlacedGroup, after: PlacedGroup, kinds: dict[tuple[str, int], str]) -> Move:
    seconds = transfer_s(after.bytes_per_rank, kinds[after.pool, after.ranks[0]], "load")
    return Move(before, after, sum(after.bytes_per_rank), seconds)


def _free_after(snapshot: Snapshot) -> FreeMemory:
    free = FreeMemory(snapshot.devices)
    for group in snapshot.placed:
        free.reserve(group.pool, group.ranks, group.bytes_per_rank)
    free.settle()
    return free


def _by_rank(domain: Domain) -> list[tuple[int, int]]:
    """(free bytes, rank), ascending by rank."""
    return sorted(((amount, -negative) for amount, negative in domain.free), key=lambda entry: entry[1])


def _cost(choice: _Choice) -> tuple[int, int, int, tuple[int, ...]]:
    return choice.moves, choice.bytes, choice.index, choice.ranks
