"""Making room for a wide model by moving others: an island of N devices in one domain, with as few moves as can be.

    1. For every domain and every choice of N of its devices that hold no group of the model yet: the fewest groups whose
       leaving frees enough on each (Filter).
    2. The cheapest choices first, by moves, then bytes (Score): try to place the groups that must leave elsewhere, with the
       island reserved, by the same packing that places everything else.
    3. Of the choices whose groups all find a place the one with the fewest moves wins (Reserve); choices that could not have
       fewer are not tried. Then the same choices again, where groups that find no place may take that of a smaller one, which
       moves on.

Pinned and busy models stay where they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb

from placement.bins import Bins
from placement.evictions import fewest_evictions
from placement.footprint import group_footprint
from placement.free_memory import Domain, FreeMemory
from placement.packing import Packer
from placement.scoring import CONSOLIDATE
from placement.transfer import transfer_s
from placement.types import ModelRequest, Move, PlacedGroup, Snapshot

_CHOICES_IN_DOMAIN = 70  # all of 8 devices; of wider domains, neighbours only
_TRIALS = 200
_DEEP_PART = 10  # of the trials, tried again with groups that move on
_DEEP_STEPS = 3000


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


def make_room(
    snapshot: Snapshot, request: ModelRequest, degree: int, busy: Collection[str] = (), trials: int = _TRIALS
) -> Room | None:
    """Room for one more group of `request` at tensor parallel `degree`; with no moves where it fits as it is.

    `busy` names models that must not move now; `trials` bounds the choices of devices that are tried. None when no room can be
    made by moving each group at most once.
    """
    # Those that take turns have no memory to give.
    snapshot = replace(snapshot, placed=tuple(group for group in snapshot.placed if not group.standby))
    requests = {model.name: model for model in snapshot.models}
    stay = {name for name, model in requests.items() if model.pinned} | set(busy) | {request.name}
    free = _free_after(snapshot)
    choices = sorted(_choices(snapshot, request, degree, stay, free), key=_cost)
    islands = []
    best: Room | None = None
    for choice in choices[:trials]:
        if best is not None and choice.moves >= len(best.moves):
            break  # those that follow need as many at least
        need = group_footprint(request, degree, 1, free.domains[choice.index].kind)[0].total
        island = PlacedGroup(request.name, choice.pool, choice.ranks, degree, 1, (need,) * degree)
        islands.append((island, choice.evicted))
        best = _fewer(best, island, _move_away(snapshot, request, island, choice.evicted))
    for island, evicted in islands[: trials // _DEEP_PART]:
        if best is not None and len(evicted) >= len(best.moves):
            break
        best = _fewer(best, island, _move_on(snapshot, request, island, evicted, stay))
    return best


def _fewer(best: Room | None, island: PlacedGroup, moves: tuple[Move, ...] | None) -> Room | None:
    if moves is None or (best is not None and len(best.moves) <= len(moves)):
        return best
    return Room(island, moves)


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
        able = [
            (rank, amount)
            for amount, rank in _by_rank(domain)
            if capacity[pool, rank] >= need and all(group.model != request.name for group in groups_on.get((pool, rank), ()))
        ]
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
    return _moves(snapshot, plan.groups, island)


def _move_on(
    snapshot: Snapshot, request: ModelRequest, island: PlacedGroup, evicted: tuple[PlacedGroup, ...], stay: Collection[str]
) -> tuple[Move, ...] | None:
    left = tuple((Counter(snapshot.placed) - Counter(evicted)).elements())
    models = (*(model for model in snapshot.models if model.name != request.name), request)
    bins = Bins(snapshot.devices, models, (*left, island), fixed=stay)
    largest_first = sorted(evicted, key=lambda group: (-sum(group.bytes_per_rank), group.model))
    if not bins.admit(largest_first, _DEEP_STEPS):
        return None
    return _moves(snapshot, bins.groups(), island)


def _moves(snapshot: Snapshot, groups: Iterable[PlacedGroup], island: PlacedGroup) -> tuple[Move, ...]:
    """From where the groups are to `groups`; those of a model that moved are paired in order."""
    kinds = {(device.pool, device.rank): device.kind for device in snapshot.devices}
    before, after = Counter(snapshot.placed), Counter(groups) - Counter([island])
    left, arrived = (sorted(part.elements(), key=_by_place) for part in (before - after, after - before))
    return tuple(
        Move(old, new, sum(new.bytes_per_rank), transfer_s(new.bytes_per_rank, kinds[new.pool, new.ranks[0]], "load"))
        for old, new in zip(left, arrived, strict=True)
    )


def _by_place(group: PlacedGroup) -> tuple[str, str, tuple[int, ...]]:
    return group.model, group.pool, group.ranks


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
