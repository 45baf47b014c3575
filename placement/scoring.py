"""Which of several places that fit is the better one. A policy lists the places of one tensor-parallel stage, best first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from placement.free_memory import Domain, FreeMemory

_BELOW_ALL = -(2**62)


class Spot(NamedTuple):
    """`ranks` devices of one domain, from `first` on in its list of free amounts. Lower scores are better."""

    score: tuple[int, ...]
    domain: Domain
    first: int

    def ranks(self, count: int) -> tuple[int, ...]:
        return tuple(sorted(-rank for _, rank in self.domain.free[self.first : self.first + count]))


Closeness = Callable[[Domain], tuple[int, int]]
"""How near a domain is to the model's other groups: (same node, same pool); the caller prefers (0, 0)."""


class Policy(Protocol):
    def everywhere(self, free: FreeMemory, kind: str, degree: int, need_bytes: int, closeness: Closeness) -> Iterator[Spot]:
        """Spots of all domains of a kind that fit, ascending by score, then by domain. Of domains that are alike, one for
        each closeness will do.
        """
        ...

    def among(self, domains: Iterable[Domain], degree: int, need_bytes: int) -> list[Spot]:
        """The same for some domains."""
        ...


class Balance:
    """The most free devices first: models share the site's bandwidth evenly, and a model that grows finds room."""

    def everywhere(self, free: FreeMemory, kind: str, degree: int, need_bytes: int, closeness: Closeness) -> Iterator[Spot]:
        for amount, negative_index in reversed(free.ranking(kind, degree)):
            if amount < need_bytes:
                return
            yield self._spot(free.domains[-negative_index], degree)

    def among(self, domains: Iterable[Domain], degree: int, need_bytes: int) -> list[Spot]:
        spots = [self._spot(domain, degree) for domain in domains if domain.fitting(need_bytes) >= degree]
        return sorted(spots, key=_order)

    def _spot(self, domain: Domain, degree: int) -> Spot:
        first = len(domain.free) - degree
        return Spot((-domain.free[first][0],), domain, first)


class Consolidate:
    """As few devices as can be: those in use before empty ones, the tightest fit among them; the largest of the empty ones,
    since it will hold most.
    """

    def everywhere(self, free: FreeMemory, kind: str, degree: int, need_bytes: int, closeness: Closeness) -> Iterator[Spot]:
        ranking = free.ranking(kind, degree)
        fitting = [free.domains[-entry[1]] for entry in ranking[bisect_left(ranking, (need_bytes, _BELOW_ALL)) :]]
        yield from self.among(_without_doubles(fitting, closeness), degree, need_bytes)

    def among(self, domains: Iterable[Domain], degree: int, need_bytes: int) -> list[Spot]:
        spots = []
        for domain in domains:
            start = len(domain.free) - domain.fitting(need_bytes)
            if len(domain.free) - start < degree:
                continue
            spots.append(self._spot(domain, degree, start, need_bytes))
        return sorted(spots, key=_order)

    def _spot(self, domain: Domain, degree: int, start: int, need_bytes: int) -> Spot:
        """The best run of neighbours in the ordered list."""
        best = None
        for first in range(start, len(domain.free) - degree + 1):
            run = domain.free[first : first + degree]
            opened = sum(-rank not in domain.used for _, rank in run)
            left = sum(amount for amount, _ in run) - degree * need_bytes
            score = (opened, -left if opened else left)
            if best is None or score < best.score:
                best = Spot(score, domain, first)
            if not opened:
                break  # later ones are less tight
        assert best is not None
        return best


BALANCE = Balance()
CONSOLIDATE = Consolidate()


def _order(spot: Spot) -> tuple:
    return spot.score, spot.domain.index


def _without_doubles(domains: list[Domain], closeness: Closeness) -> Iterator[Domain]:
    """Untouched domains with the same devices are alike: the first by index stands for all."""
    seen: dict[tuple, Domain] = {}
    for domain in domains:
        if domain.used:
            yield domain
            continue
        kind = (closeness(domain), *(amount for amount, _ in domain.free))
        if kind not in seen or domain.index < seen[kind].index:
            seen[kind] = domain
    yield from seen.values()
