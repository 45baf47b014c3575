"""The fewest worker groups whose leaving frees enough on each of some devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from placement.types import PlacedGroup

_SEARCH_STEPS = 2000


def fewest_evictions(
    lacks: Mapping[int, int], groups_on: Mapping[int, Sequence[PlacedGroup]], stay: Collection[str]
) -> tuple[PlacedGroup, ...] | None:
    """`lacks`: bytes by rank that must become free. Groups of models in `stay` do not leave. None when that is not enough.

    Searches by number of groups, so the first answer is one of the smallest; of these the one found first, larger groups
    before smaller ones. After `_SEARCH_STEPS` the best found by taking the largest first.
    """
    leave = {rank: [group for group in groups if group.model not in stay] for rank, groups in groups_on.items()}
    share = {
        (id(group), rank): group.bytes_per_rank[group.ranks.index(rank)] for rank, groups in leave.items() for group in groups
    }
    for rank, groups in leave.items():
        groups.sort(key=lambda group: -share[id(group), rank])
        if sum(share[id(group), rank] for group in groups) < lacks[rank]:
            return None
    steps = _SEARCH_STEPS

    def search(missing: dict[int, int], taken: tuple[PlacedGroup, ...], most: int) -> tuple[PlacedGroup, ...] | None:
        nonlocal steps
        open_ranks = [rank for rank, size in missing.items() if size > 0]
        if not open_ranks:
            return taken
        if len(taken) == most or steps <= 0:
            return None
        rank = max(open_ranks, key=lambda rank: (missing[rank], -rank))
        for group in leave[rank]:
            if any(group is other for other in taken):
                continue
            steps -= 1
            rest = {other: size - share.get((id(group), other), 0) for other, size in missing.items()}
            found = search(rest, (*taken, group), most)
            if found is not None:
                return found
        return None

    greedy = _largest_first(lacks, leave, share)
    for most in range(len(greedy)):
        found = search(dict(lacks), (), most)
        if found is not None:
            return found
    return greedy


def _largest_first(
    lacks: Mapping[int, int], leave: Mapping[int, Sequence[PlacedGroup]], share: Mapping[tuple[int, int], int]
) -> tuple[PlacedGroup, ...]:
    missing = dict(lacks)
    taken: list[PlacedGroup] = []
    while any(size > 0 for size in missing.values()):
        rank = max(missing, key=lambda rank: (missing[rank], -rank))
        group = next(group for group in leave[rank] if not any(group is other for other in taken))
        taken.append(group)
        for other in missing:
            missing[other] -= share.get((id(group), other), 0)
    return tuple(taken)
