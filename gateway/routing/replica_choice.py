"""Which pool takes a request."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar


class Candidate(Protocol):
    """A pool with a ready worker group of the model, and a link to it that is up."""

    def outstanding_tokens(self, model: str) -> int:
        """Tokens that its groups of the model still have to compute, with what this gateway sent since it was last told."""
        ...

    def ready_groups(self, model: str) -> int: ...


C = TypeVar("C", bound=Candidate)


class PowerOfTwoChoice(Generic[C]):
    """Chooses a pool by power of two random choices over outstanding tokens.

    1. One candidate: it is taken.
    2. Of more, two different ones are drawn at random.
    3. Each is weighed by the tokens it still has to compute for the model, per ready worker group.
    4. The lighter takes the request; of two equal ones, the first drawn.

    Drawing only two keeps many gateways, each with a slightly stale view, from all sending to the same lightest pool.
    Which worker group inside the pool takes it is the pool driver's choice.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, candidates: Sequence[C], model: str) -> C | None:
        """None when there are no candidates."""
        if len(candidates) <= 1:
            return candidates[0] if candidates else None
        first, second = self._rng.sample(candidates, 2)
        return second if _weight(second, model) < _weight(first, model) else first


def _weight(candidate: Candidate, model: str) -> float:
    return candidate.outstanding_tokens(model) / max(1, candidate.ready_groups(model))
