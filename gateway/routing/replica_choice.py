"""Which pool takes a request."""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

PREFIX_BLOCKS = (32, 16, 8, 4, 2, 1)
BLOCK_TOKENS = 16
REMEMBERED_PREFIXES = 8192
# A pool that has the prefix may be so much fuller than the one that would be chosen by load: recomputing costs time too.
AFFINITY_FACTOR = 1.5
AFFINITY_SLACK_TOKENS = 512


class Candidate(Protocol):
    """A pool with a ready worker group of the model, and a link to it that is up."""

    @property
    def pool(self) -> str: ...

    def outstanding_tokens(self, model: str) -> int:
        """Tokens that its groups of the model still have to compute, with what this gateway sent since it was last told."""
        ...

    def ready_groups(self, model: str) -> int: ...


C = TypeVar("C", bound=Candidate)


class PrefixTable:
    """Which pool last computed a prompt that began like this one. Bounded: what was not asked for longest is forgotten.

    Beginnings of 1, 2, 4, … 32 blocks of tokens are remembered, by their hash; the longest that is known counts.
    """

    def __init__(self, size: int = REMEMBERED_PREFIXES) -> None:
        self._size = size
        self._pools: OrderedDict[tuple[str, int], str] = OrderedDict()

    def keys(self, model: str, prompt_ids: Sequence[int]) -> list[tuple[str, int]]:
        """The longest beginning first; none for a prompt shorter than a block."""
        lengths = [blocks * BLOCK_TOKENS for blocks in PREFIX_BLOCKS if blocks * BLOCK_TOKENS <= len(prompt_ids)]
        if not lengths:
            return []
        ids = array("I", prompt_ids[: lengths[0]]).tobytes()
        width = array("I").itemsize
        return [(model, hash(ids[: length * width])) for length in lengths]

    def find(self, keys: Sequence[tuple[str, int]]) -> str | None:
        return next((self._pools[key] for key in keys if key in self._pools), None)

    def remember(self, keys: Sequence[tuple[str, int]], pool: str) -> None:
        for key in keys:
            self._pools[key] = pool
            self._pools.move_to_end(key)
        while len(self._pools) > self._size:
            self._pools.popitem(last=False)


class ReplicaChoice(Generic[C]):
    """Chooses a pool by power of two random choices over outstanding tokens, and where it last computed this prompt's beginning.

    1. One candidate: it is taken.
    2. Of more, two different ones are drawn at random.
    3. Each is weighed by the tokens it still has to compute for the model, per ready worker group.
    4. The lighter would take the request; of two equal ones, the first drawn.
    5. A candidate that computed the same beginning lately takes it instead, unless it has much more to do: more than
       AFFINITY_FACTOR of the other's tokens plus AFFINITY_SLACK_TOKENS.

    Drawing only two keeps many gateways, each with a slightly stale view, from all sending to the same lightest pool.
    Which worker group inside the pool takes it is the pool driver's choice.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._prefixes = PrefixTable()

    def choose(self, candidates: Sequence[C], model: str, prompt_ids: Sequence[int] = ()) -> C | None:
        """None when there are no candidates."""
        if not candidates:
            return None
        keys = self._prefixes.keys(model, prompt_ids)
        chosen = self._by_load(candidates, model)
        near = self._prefixes.find(keys)
        for candidate in candidates:
            if candidate.pool == near:
                limit = _weight(chosen, model) * AFFINITY_FACTOR + AFFINITY_SLACK_TOKENS
                chosen = candidate if _weight(candidate, model) <= limit else chosen
                break
        self._prefixes.remember(keys, chosen.pool)
        return chosen

    def _by_load(self, candidates: Sequence[C], model: str) -> C:
        if len(candidates) == 1:
            return candidates[0]
        first, second = self._rng.sample(candidates, 2)
        return second if _weight(second, model) < _weight(first, model) else first


def _weight(candidate: Candidate, model: str) -> float:
    return candidate.outstanding_tokens(model) / max(1, candidate.ready_groups(model))
