"""Which of several places that fit is the better one. Scores are compared, lowest first; the caller adds the tie-breaks."""

from __future__ import annotations

from collections.abc import Callable

from placement.free_memory import Domain

Score = Callable[[Domain, int, int], tuple[int, int]]
"""(domain, bytes needed on each rank, ranks) -> (score, first index into `domain.free` of the run of ranks to take)."""


def balance(domain: Domain, need_bytes: int, ranks: int) -> tuple[int, int]:
    """The most free devices: models share the site's bandwidth evenly, and a model that grows finds room."""
    first = len(domain.free) - ranks
    return -domain.free[first][0], first


def consolidate(domain: Domain, need_bytes: int, ranks: int) -> tuple[int, int]:
    """The tightest devices that fit: as few devices as can be are used, and large holes stay whole."""
    first = len(domain.free) - domain.fitting(need_bytes)
    left = sum(free - need_bytes for free, _ in domain.free[first : first + ranks])
    return left, first
