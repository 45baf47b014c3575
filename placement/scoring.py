"""Which of several places that fit is the better one. A policy lists the places of one tensor-parallel stage, best first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from placement.free_memory import Domain, FreeMemory


class Spot(NamedTuple):
    """Devices of one domain for one stage. Lower scores are better."""

    score: tuple[int, ...]
    domain: Domain
    ranks: tuple[int, ...]  # ascending
    apart: bool = False  # they exchange over the link between NUMA nodes


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
    """The most free devices first: models share the site's bandwidth evenly, and a model that grows finds room.
    Within a domain those of one NUMA node before these.
    """

    def everywhere(self, free: FreeMemory, kind: str, degree: int, need_bytes: int, closeness: Closeness) -> Iterator[Spot]:
        for amount, negative_index in reversed(free.ranking(kind, degree)):
            if amount < need_bytes:
                return
            yield self._spot(free.domains[-negative_index], degree, need_bytes)

    def among(self, domains: Iterable[Domain], degree: int, need_bytes: int) -> list[Spot]:
        spots = [self._spot(domain, degree, need_bytes) for domain in domains if domain.fitting(need_bytes) >= degree]
        return sorted(spots, key=_order)

    def _spot(self, domain: Domain, degree: int, need_bytes: int) -> Spot:
        chosen, apart = domain.most_free(degree, need_bytes)
        return Spot((-domain.free[-degree][0],), domain, tuple(sorted(-rank for _, rank in chosen)), apart)


class Consolidate:
    """As few devices as can be: those in use before empty ones, the tightest fit among them; the largest of the empty ones,
    since it will hold most.
    """

    def everywhere(self, free: FreeMemory, kind: str, degree: int, need_bytes: int, closeness: Closeness) -> Iterator[Spot]:
        domains = [domain for domain in free.in_use(kind) if domain.fitting(need_bytes) >= degree]
        for alike in free.unused(kind):
            domains += _one_of_each_closeness(alike, degree, need_bytes, closeness)
        yield from self._ordered(domains, degree, need_bytes)

    def among(self, domains: Iterable[Domain], degree: int, need_bytes: int) -> list[Spot]:
        fitting = (domain for domain in domains if domain.fitting(need_bytes) >= degree)
        return list(self._ordered(fitting, degree, need_bytes))

    def _ordered(self, domains: Iterable[Domain], degree: int, need_bytes: int) -> Iterator[Spot]:
        """Ascending by how many devices must be opened; what opens more is looked at only when it is asked for."""
        by_opened: dict[int, list[Domain]] = {}
        for domain in domains:
            by_opened.setdefault(max(0, degree - domain.used_fitting(need_bytes)), []).append(domain)
        for opened in sorted(by_opened):
            yield from sorted((self._spot(domain, degree, need_bytes, opened) for domain in by_opened[opened]), key=_order)

    def _spot(self, domain: Domain, degree: int, need_bytes: int, opened: int) -> Spot:
        start = len(domain.used_free) - domain.used_fitting(need_bytes)
        chosen = domain.used_free[start : start + degree]
        if opened:
            chosen = chosen + [entry for entry in domain.free if -entry[1] not in domain.used][-opened:]
        left = sum(amount for amount, _ in chosen) - degree * need_bytes
        return Spot((opened, -left if opened else left), domain, tuple(sorted(-rank for _, rank in chosen)))


BALANCE = Balance()
CONSOLIDATE = Consolidate()


def _order(spot: Spot) -> tuple:
    return spot.score, spot.domain.index


def _one_of_each_closeness(alike: Iterator[Domain], degree: int, need_bytes: int, closeness: Closeness) -> list[Domain]:
    """Of domains that are alike: the first at each distance, and none beyond the first that is far away."""
    found: dict[tuple[int, int], Domain] = {}
    for domain in alike:
        if domain.fitting(need_bytes) < degree:
            break
        found.setdefault(closeness(domain), domain)
        if (0, 0) in found:
            break
    return list(found.values())
