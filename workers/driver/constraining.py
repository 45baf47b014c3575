"""Answers that follow a schema: their sequences stay out of the steps until all ranks that sample have compiled it. Pure.

Nobody else waits: ranks compile beside the steps. The sequence stands in its group's queue meanwhile, so its place, its deadline
and its cancel are as everybody's; after a preemption it is prepared anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.api.errors import ErrorCode
from workers.driver.batching import Batcher
from workers.driver.effects import Effects
from workers.driver.group import Group
from workers.driver.group_memory import enter_grammar
from workers.driver.pool_state import PoolState
from workers.driver.requests import Requests
from workers.driver.sequence import Sequence
from workers.messages import Constrain, Constrained

COMPILE_S = 10.0
"""Ranks that say nothing for so long end the request that they were asked for first. The library's own limits end nearly all
that is too large in less than a second."""


@dataclass
class _Asked:
    group: Group
    sequence: Sequence
    pending: set[int]  # ranks
    at: float
    error: str = ""


class Constraining:
    def __init__(self, state: PoolState, effects: Effects, requests: Requests) -> None:
        self._state = state
        self._effects = effects
        self._requests = requests
        self._asked: dict[int, _Asked] = {}  # by sequence, in order; until it began, or will not
        self._heard_at = 0.0

    def pump(self, now: float) -> None:
        """Before steps are planned: ask for what is new, forget what ended."""
        for group in self._state.groups.values():
            batcher = group.batcher
            if isinstance(batcher, Batcher) and batcher.unprepared:
                fresh, batcher.unprepared = batcher.unprepared, []
                for sequence in fresh:
                    if not sequence.ended:
                        self._ask(now, group, sequence)
        for asked in [asked for asked in self._asked.values() if asked.sequence.ended or asked.sequence.known_to_ranks]:
            self._forget(asked)

    def on_constrained(self, now: float, rank: int, report: Constrained) -> None:
        """A rank is done with it."""
        self._heard_at = now
        asked = self._asked.get(report.sequence)
        if asked is None or self._state.groups.get(report.group_id) is not asked.group:
            return  # it ended meanwhile
        asked.pending.discard(rank)
        asked.error = asked.error or report.error
        enter_grammar(self._state.ledger, asked.group, rank, report.grammar_bytes)
        if asked.pending:
            return
        if asked.error:
            self._refuse(asked, f"the schema cannot be used: {asked.error}")
            return
        asked.sequence.prepared = True

    def expire(self, now: float) -> None:
        """The first that is still asked for may be what the ranks cannot get done with."""
        first = next((asked for asked in self._asked.values() if asked.pending), None)
        if first is not None and now - max(first.at, self._heard_at) > COMPILE_S:
            self._heard_at = now
            self._refuse(first, f"the schema was not compiled within {COMPILE_S:.0f} s; simplify it")

    def _ask(self, now: float, group: Group, sequence: Sequence) -> None:
        ranks = group.ranks[-group.wanted.placement.tensor_parallel :]
        self._asked[sequence.id] = _Asked(group, sequence, set(ranks), now)
        for rank in ranks:
            self._effects.send(rank, Constrain(group.id, sequence.id, sequence.request.sampling.json_schema))

    def _refuse(self, asked: _Asked, why: str) -> None:
        text = f"model `{asked.group.model}`: {why}"
        self._requests.finish(asked.sequence.request.key, "error", ErrorCode.INVALID, text, field="json_schema")

    def _forget(self, asked: _Asked) -> None:
        del self._asked[asked.sequence.id]
        if asked.sequence.ended and self._state.groups.get(asked.group.id) is asked.group:
            for rank in asked.group.ranks[-asked.group.wanted.placement.tensor_parallel :]:
                self._effects.send(rank, Constrain(asked.group.id, asked.sequence.id))
