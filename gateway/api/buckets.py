"""A histogram of durations as plain counts, so that it can travel in a heartbeat and be shown as Prometheus shows its own."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

SWITCH_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""From a flipped pointer to the load of a large checkpoint."""


@dataclass(slots=True)
class Buckets:
    """`counts` has one entry a bound and one for what is longer than all of them; each counts its own bucket only."""

    bounds_s: tuple[float, ...] = SWITCH_BOUNDS_S
    counts: list[int] = field(default_factory=list)
    total_s: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds_s) + 1)

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.total_s += seconds


def cumulative(counts: list[int] | tuple[int, ...], bounds_s: tuple[float, ...] = SWITCH_BOUNDS_S) -> list[tuple[str, float]]:
    """As Prometheus wants them: (upper bound, how many were not above it), the last one `+Inf`. Empty counts read as zeros."""
    names = [*(repr(bound) for bound in bounds_s), "+Inf"]
    sums, total = [], 0
    for index, name in enumerate(names):
        total += counts[index] if index < len(counts) else 0
        sums.append((name, float(total)))
    return sums
