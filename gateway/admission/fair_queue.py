"""Who is let through next. Pure: no clock, no I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

AGING_PER_S = 10.0
"""A request that has waited for a second counts as much as one whose priority is so much higher, so none waits for ever."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Waiting(Generic[T]):
    """One that waits. `cost` is what it takes of its tenant's share, in tokens."""

    who: T
    tenant: str
    weight: float
    priority: int
    cost: float
    since_s: float

    def urgency(self, now_s: float) -> float:
        return self.priority + (now_s - self.since_s) * AGING_PER_S


@dataclass(slots=True)
class _Line(Generic[T]):
    waiting: deque[Waiting[T]] = field(default_factory=deque)
    passed: float = 0.0  # cost let through, by weight: its virtual time


class FairQueue(Generic[T]):
    """A bounded queue of requests of several tenants.

    Who is next:
    1. Of each tenant's requests, the one with the highest priority, raised by the time it has waited.
    2. Of these, those as urgent as the most urgent, give or take a second of waiting, are equal; among equals the tenant that
       got least by its weight (start-time fair queuing: one that was away does not catch up).

    Who is refused when it is full: whoever has the most waiting by weight loses the last that came; so a newcomer is
    refused only if its own tenant is that one, and no tenant can keep the others out.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        self._now = 0.0  # virtual time of the last that was let through: where a tenant that was away begins
        self._left: dict[str, float] = {}  # tenants that left ahead of it
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, waiting: Waiting[T], limit: int) -> Waiting[T] | None:
        """Adds one; returns who is refused for it, which may be itself."""
        line = self._lines.get(waiting.tenant)
        if line is None:
            line = self._lines[waiting.tenant] = _Line(passed=max(self._now, self._left.pop(waiting.tenant, 0.0)))
        line.waiting.append(waiting)
        self._length += 1
        if self._length <= limit:
            return None
        longest = max(self._lines.values(), key=lambda each: len(each.waiting) / each.waiting[-1].weight)
        lowest = min(candidate.priority for candidate in longest.waiting)
        refused = next(candidate for candidate in reversed(longest.waiting) if candidate.priority == lowest)
        self.remove(refused)
        return refused

    def pop(self, now_s: float) -> Waiting[T] | None:
        """Takes out who is next; None when nobody waits."""
        if not self._lines:
            return None
        fronts = [(max(line.waiting, key=lambda each: each.urgency(now_s)), line) for line in self._lines.values()]
        most_urgent = max(front.urgency(now_s) for front, _ in fronts)
        equals = [entry for entry in fronts if entry[0].urgency(now_s) >= most_urgent - AGING_PER_S]
        chosen, line = min(equals, key=lambda entry: (entry[1].passed, entry[0].since_s))
        self._now = max(self._now, line.passed)
        self._left = {tenant: passed for tenant, passed in self._left.items() if passed > self._now}
        line.passed += chosen.cost / chosen.weight
        self.remove(chosen)
        return chosen

    def remove(self, waiting: Waiting[T]) -> None:
        """Takes out one that left; nothing when it is not in any more."""
        line = self._lines.get(waiting.tenant)
        if line is None or waiting not in line.waiting:
            return
        line.waiting.remove(waiting)
        self._length -= 1
        if not line.waiting:
            self._left[waiting.tenant] = line.passed
            del self._lines[waiting.tenant]
