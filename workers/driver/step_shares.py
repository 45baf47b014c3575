"""Whose step comes next on the ranks that models share: weighted fair sharing of their time. Pure.

Each group has a clock: the seconds that its steps took, over its weight. A group that is ahead of another one's clock by more
than `LEAD_S`, while that one computes on a rank of its, sits out until it has caught up. So models with steps alike take turns as
ever, and one with long steps (large, or with a long prompt) does not take the time of one with short ones. Only groups with a
step in flight count: who waits for memory holds up nobody, and no rank is left without work.
"""

from __future__ import annotations

from collections.abc import Iterable

from workers.driver.group import Group

LEAD_S = 0.05
PRIORITY_DOUBLES = 10  # so many steps of priority are worth twice the time


class StepShares:
    def __init__(self) -> None:
        self._clocks: dict[int, float] = {}  # by rank: the slowest clock of those that compute there, never going back
        self._done_at: dict[int, float] = {}  # by rank: when its last step ended

    def look(self, groups: Iterable[Group]) -> list[Group]:
        """Those that compute, slowest clock first. One that has something to do again does not catch up on what it did not ask
        for: it begins where the others are."""
        busy = []
        for group in groups:
            if group.computes and not group.computing:
                group.clock_s = max(group.clock_s, *(self._clocks.get(rank, 0.0) for rank in group.ranks))
            group.computing = group.computes
            if group.computing:
                busy.append(group)
        return sorted(busy, key=lambda group: (group.clock_s, group.id))

    def must_wait(self, group: Group, busy: Iterable[Group]) -> bool:
        return any(
            other is not group and other.steps and _meet(other, group) and group.clock_s - other.clock_s > LEAD_S
            for other in busy
        )

    def charge(self, group: Group, sent_at: float, now: float, groups: Iterable[Group]) -> None:
        """A step of it is done. Ranks compute in order, so it took them from the end of what they did before, or from when it
        was sent; what it waited for others is theirs."""
        seconds = now - max(sent_at, *(self._done_at.get(rank, 0.0) for rank in group.ranks))
        self._done_at.update(dict.fromkeys(group.ranks, now))
        group.clock_s += seconds / 2.0 ** (group.spec.priority / PRIORITY_DOUBLES)
        computing = [other for other in groups if other.computing]
        for rank in group.ranks:
            slowest = min((other.clock_s for other in computing if rank in other.ranks), default=group.clock_s)
            self._clocks[rank] = max(self._clocks.get(rank, 0.0), slowest)


def _meet(one: Group, other: Group) -> bool:
    return not set(one.ranks).isdisjoint(other.ranks)
