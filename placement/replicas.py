"""Where the worker groups of one model are, and what of the site that leaves for its next one.

Two of them on one device would share its compute and fall with it: neither throughput nor safety is gained. So a device
that holds a group of a model is no candidate for another one of the same model.
"""

from __future__ import annotations

from collections.abc import Iterable

from placement.free_memory import Domain, DomainKey
from placement.scoring import Policy, Spot
from placement.types import PlacedGroup


class Replicas:
    """The groups of one model, by where they are."""

    def __init__(self) -> None:
        self.ranks: dict[str, set[int]] = {}  # by pool
        self._nodes: set[str] = set()
        self._domains: set[DomainKey] = set()

    def add(self, group: PlacedGroup, domains: Iterable[Domain]) -> None:
        """`domains` has those that the ranks of `group` are in."""
        self.ranks.setdefault(group.pool, set()).update(group.ranks)
        for domain in domains:
            self._domains.add(domain.key)
            self._nodes.add(domain.key[1])

    def bar(self, pool: str, ranks: Iterable[int], domains: Iterable[Domain]) -> None:
        """As if these ranks, of these domains, held a group; also its pool counts as near then."""
        self.ranks.setdefault(pool, set()).update(ranks)
        self._domains.update(domain.key for domain in domains)

    def copy(self) -> Replicas:
        same = Replicas()
        same.ranks = {pool: set(ranks) for pool, ranks in self.ranks.items()}
        same._nodes, same._domains = set(self._nodes), set(self._domains)
        return same

    def overlap(self, group: PlacedGroup) -> bool:
        return not self.ranks.get(group.pool, set()).isdisjoint(group.ranks)

    def within(self, domain: Domain) -> bool:
        return domain.key in self._domains

    def closeness(self, domain: Domain) -> tuple[int, int]:
        """(same node, same pool) as one of the groups."""
        return int(domain.key[1] in self._nodes), int(domain.key[0] in self.ranks)

    def rest(self, domain: Domain) -> Domain:
        """What another group may take of it; the domain itself where none of its devices holds one."""
        return domain.without(self.ranks[domain.key[0]]) if self.within(domain) else domain

    def farthest(self, spots: Iterable[Spot], policy: Policy, degree: int, need_bytes: int) -> Spot | None:
        """Of spots ascending by score the best one that is farthest from the groups and shares no device with them; at equal
        distance one inside a NUMA node first.
        """
        best: tuple[tuple[int, int], bool, tuple[int, ...], int] | None = None
        best_spot = None
        for spot in spots:
            near = self.closeness(spot.domain)
            if best is not None and best[:3] <= (near, spot.apart, spot.score):
                continue
            if self.within(spot.domain):
                # Fewer devices score no better than all of them, so what was skipped above was skipped rightly.
                left = policy.among([self.rest(spot.domain)], degree, need_bytes)
                if not left:
                    continue
                (spot,) = left
            order = (near, spot.apart, spot.score, spot.domain.index)
            if best is None or order < best:
                best, best_spot = order, spot
            if near == (0, 0) and not spot.apart:
                break
        return best_spot
