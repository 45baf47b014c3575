"""Lets requests through to the pools as these have room, in a fair order; the rest wait here, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.admission.caller import Caller
from gateway.admission.fair_queue import FairQueue, Waiting
from gateway.api.errors import ErrorCode, YardError

LOOK_AGAIN_S = 0.05
"""Others make room too, of which this gateway hears only with its own frames and with heartbeats."""
RATE_MEMORY = 0.1
CAUTION = 1.15
"""Times are averages, and an answer that comes too late has cost the same as one in time."""
SHORTEST_RETRY_S = 0.1
LONGEST_RETRY_S = 30.0
UNKNOWN_RETRY_S = 1.0
"""Of a model of which it is not known how fast it is, and none of whose replicas is on its way: as its pools say then."""
SPENT_S = 0.002
"""A deadline so near passes before anything could be answered."""


@dataclass(slots=True, eq=False)
class _Entry:
    through: asyncio.Future[None]
    count: int
    cost: float
    deadline: float | None


@dataclass(slots=True)
class _Model:
    queue: FairQueue[_Entry] = field(default_factory=FairQueue)
    inside: int = 0  # sequences that were let through and have not ended
    ended_s: float | None = None  # the last end, if requests waited then
    interval_s: float = 0.0  # between two ends while requests wait, on average; 0: not known
    cost_s: float = 0.0  # from being let through to the end, for each unit of cost; 0: not known

    def ends(self, count: int, cost: float, began_s: float, now_s: float) -> None:
        """A request that was answered whole. Only what happens while requests wait says how fast a full model is."""
        if not len(self.queue):
            self.ended_s = None
            return
        if self.ended_s is not None:
            self.interval_s = _towards(self.interval_s, (now_s - self.ended_s) / count)
        self.cost_s = _towards(self.cost_s, (now_s - began_s) / max(cost, 1.0))
        self.ended_s = now_s

    def done_s(self, cost: float, ahead: int) -> float:
        """Until a request of this cost that lets so many others go first is answered, as far as is known."""
        return (ahead * self.interval_s + cost * self.cost_s) * CAUTION


def _towards(average: float, sample: float) -> float:
    return average + (sample - average) * RATE_MEMORY if average else sample


class Ticket:
    """Lets `count` sequences of a model run, until `leave`; that may be called more than once."""

    __slots__ = ("_began_s", "_cost", "_count", "_gate", "_model")

    def __init__(self, gate: Gate, model: str, count: int, cost: float, began_s: float) -> None:
        self._gate: Gate | None = gate
        self._model = model
        self._count = count
        self._cost = cost
        self._began_s = began_s

    def leave(self, *, answered: bool = False) -> None:
        """`answered`: whole, so that it says how long requests take."""
        gate, self._gate = self._gate, None
        if gate is not None:
            if answered:
                gate.learn(self._model, self._count, self._cost, self._began_s)
            gate.left(self._model, self._count)


class Gate:
    """One per gateway. `room(model, inside)`: sequences that its pools would take now, when `inside` of this gateway were let
    through, or None where that is not known; `limit(model)`: how many requests may wait here; `coming_s(model)`: until its next
    replica serves, or None when none is on its way.

    `enter`, in order:
    1. Nobody waits and there is room, or none of this gateway's is inside: let through at once.
    2. Its deadline has passed: DEADLINE. It cannot be expected to be answered before it (requests that wait, times the time
       between two ends, and what it takes itself): RESOURCE_EXHAUSTED at once, with the time after which it is worth trying:
       until the queue is empty, or until another replica serves, whichever is known to be sooner.
    3. It waits. When the queue is full, whoever has most in it by weight loses its last (see `FairQueue`). When its turn
       comes and what is left is too short by then, it is refused too: computing it would only make others late.
    """

    def __init__(
        self,
        room: Callable[[str, int], int | None],
        limit: Callable[[str], int],
        coming_s: Callable[[str], float | None] = lambda model: None,
    ) -> None:
        self._room = room
        self._limit = limit
        self._coming_s = coming_s
        self._models: dict[str, _Model] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        return sum(len(model.queue) for model in self._models.values())

    def enter_now(self, model: str, *, count: int, cost: float) -> Ticket | None:
        """None when it has to wait."""
        state = self._models.setdefault(model, _Model())
        if len(state.queue) or not self._has_room(model, state, count):
            return None
        state.inside += count
        return Ticket(self, model, count, cost, asyncio.get_running_loop().time())

    async def enter(self, model: str, caller: Caller, *, count: int, cost: float, deadline: float | None) -> Ticket:
        if (ticket := self.enter_now(model, count=count, cost=cost)) is not None:
            return ticket
        state = self._models[model]
        loop = asyncio.get_running_loop()
        if deadline is not None and (error := self._late(model, state, deadline, cost, ahead=len(state.queue) + 1)) is not None:
            raise error
        entry = _Entry(loop.create_future(), count, cost, deadline)
        waiting = Waiting(entry, caller.tenant, caller.spec.weight, caller.priority, cost, loop.time())
        refused = state.queue.push(waiting, self._limit(model))
        if refused is not None:
            cause = f"tenant `{refused.tenant}` has its share of the queue" if refused.tenant else "its queue is full"
            error = self._refusal(model, state, cause)
            if refused is waiting:
                raise error
            refused.who.through.set_exception(error)
        self._arm()
        try:
            await entry.through
        except BaseException:
            state.queue.remove(waiting)
            if entry.through.done() and not entry.through.cancelled() and entry.through.exception() is None:
                self.left(model, count)  # it was let through in the moment in which its caller left
            raise
        return Ticket(self, model, count, cost, loop.time())

    def learn(self, model: str, count: int, cost: float, began_s: float) -> None:
        self._models[model].ends(count, cost, began_s, asyncio.get_running_loop().time())

    def left(self, model: str, count: int) -> None:
        self._models[model].inside -= count
        self.pump(model)

    def pump(self, model: str) -> None:
        """Lets through whom there is room for. Called when there may be more room."""
        state = self._models.get(model)
        if state is None:
            return
        now_s = asyncio.get_running_loop().time()
        while len(state.queue) and self._has_room(model, state, 1):
            waiting = state.queue.pop(now_s)
            if waiting is None or waiting.who.through.done():
                continue
            entry = waiting.who
            if (
                entry.deadline is not None
                and (error := self._late(model, state, entry.deadline, entry.cost, ahead=0)) is not None
            ):
                entry.through.set_exception(error)
                continue
            state.inside += entry.count
            entry.through.set_result(None)

    def _has_room(self, model: str, state: _Model, count: int) -> bool:
        room = self._room(model, state.inside)
        return room is None or room >= count or not state.inside

    def _late(self, model: str, state: _Model, deadline: float, cost: float, *, ahead: int) -> YardError | None:
        """A deadline that has passed is always said to have passed; one that will have is a matter of load."""
        left_s = deadline - asyncio.get_running_loop().time()
        if left_s < SPENT_S:
            return YardError(ErrorCode.DEADLINE, f"the deadline passed before it was the request's turn for model `{model}`")
        if left_s >= state.done_s(cost, ahead):
            return None
        wait_s = len(state.queue) * state.interval_s
        return self._refusal(
            model, state, f"{len(state.queue)} requests wait, about {wait_s:.1f} s, which the deadline does not allow"
        )

    def _refusal(self, model: str, state: _Model, cause: str) -> YardError:
        known = [(len(state.queue) + 1) * state.interval_s] if state.interval_s else []
        if (coming_s := self._coming_s(model)) is not None:
            known.append(coming_s)
        retry_s = min(max(min(known, default=UNKNOWN_RETRY_S), SHORTEST_RETRY_S), LONGEST_RETRY_S)
        return YardError(
            ErrorCode.EXHAUSTED,
            f"model `{model}` is at its limit: {cause}; try again in {retry_s:.1f} s, or raise its replicas",
            retry_after_s=retry_s,
        )

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        for model in [model for model, state in self._models.items() if len(state.queue)]:
            self.pump(model)
        if self.waiting:
            self._arm()
