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
LONGEST_RETRY_S = 30.0


@dataclass(slots=True, eq=False)
class _Entry:
    through: asyncio.Future[None]
    count: int


@dataclass(slots=True)
class _Model:
    queue: FairQueue[_Entry] = field(default_factory=FairQueue)
    inside: int = 0  # sequences that were let through and have not ended
    ended_s: float | None = None  # the last end, if requests waited then
    interval_s: float = 0.0  # between two ends while requests wait, on average; 0: not known

    def ends(self, count: int, now_s: float) -> None:
        """Only what happens while requests wait says how fast a full model is."""
        if not len(self.queue):
            self.ended_s = None
            return
        if self.ended_s is not None:
            gap_s = (now_s - self.ended_s) / count
            self.interval_s += (gap_s - self.interval_s) * (RATE_MEMORY if self.interval_s else 1.0)
        self.ended_s = now_s


class Ticket:
    """Lets `count` sequences of a model run, until `leave`; that may be called more than once."""

    __slots__ = ("_gate", "_model", "count")

    def __init__(self, gate: Gate, model: str, count: int) -> None:
        self._gate: Gate | None = gate
        self._model = model
        self.count = count

    def leave(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.left(self._model, self.count)


class Gate:
    """One per gateway. `room(model, inside)`: sequences that its pools would take now, when `inside` of this gateway were let
    through, or None where that is not known; `limit(model)`: how many requests may wait here.

    `enter`, in order:
    1. Nobody waits and there is room, or none of this gateway's is inside: let through at once.
    2. The wait that is to be expected (requests that wait, times the time between two ends) is longer than what is left of
       the deadline: RESOURCE_EXHAUSTED at once, with the time after which it is worth trying.
    3. It waits. When the queue is full, whoever has most in it by weight loses its last (see `FairQueue`).
    """

    def __init__(self, room: Callable[[str, int], int | None], limit: Callable[[str], int]) -> None:
        self._room = room
        self._limit = limit
        self._models: dict[str, _Model] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        return sum(len(model.queue) for model in self._models.values())

    def expected_wait_s(self, model: str) -> float:
        """Of a request that comes now; 0 when nothing is known yet."""
        state = self._models.get(model)
        return (len(state.queue) + 1) * state.interval_s if state is not None and len(state.queue) else 0.0

    async def enter(self, model: str, caller: Caller, *, count: int, cost: float, deadline: float | None) -> Ticket:
        state = self._models.setdefault(model, _Model())
        if not len(state.queue) and self._has_room(model, state, count):
            state.inside += count
            return Ticket(self, model, count)
        loop = asyncio.get_running_loop()
        wait_s = (len(state.queue) + 1) * state.interval_s
        if deadline is not None and loop.time() + wait_s > deadline:
            raise self._refusal(model, state, f"about {wait_s:.1f} s of waiting are longer than the deadline")
        entry = _Entry(loop.create_future(), count)
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
        return Ticket(self, model, count)

    def left(self, model: str, count: int) -> None:
        state = self._models[model]
        state.ends(count, asyncio.get_running_loop().time())
        state.inside -= count
        self.pump(model)

    def pump(self, model: str) -> None:
        """Lets through whom there is room for. Called when there may be more room."""
        state = self._models.get(model)
        if state is None:
            return
        while len(state.queue) and self._has_room(model, state, 1):
            waiting = state.queue.pop(asyncio.get_running_loop().time())
            if waiting is not None and not waiting.who.through.done():
                state.inside += waiting.who.count
                waiting.who.through.set_result(None)

    def _has_room(self, model: str, state: _Model, count: int) -> bool:
        room = self._room(model, state.inside)
        return room is None or room >= count or not state.inside

    def _refusal(self, model: str, state: _Model, cause: str) -> YardError:
        retry_s = min(LONGEST_RETRY_S, max(0.1, len(state.queue) * state.interval_s))
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
