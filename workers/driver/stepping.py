"""Sends the steps of all groups in one order, and accounts for what comes back.

A group has at most one step in flight a pipeline stage, and where that pays one more planned ahead, so the groups of a rank take
turns: nobody's second step passes another's first, and nobody's steps take more of the time than its share (rule 7).
"""

from __future__ import annotations

from gateway.api.errors import ErrorCode
from workers.driver.effects import Effects
from workers.driver.group import Group, StepInFlight
from workers.driver.pool_state import PoolState
from workers.driver.requests import Requests
from workers.driver.step_shares import StepShares
from workers.messages import Step, StepDone

_SPEED_WEIGHT = 0.1  # of the newest step in the moving average


class Stepper:
    def __init__(self, state: PoolState, effects: Effects, requests: Requests) -> None:
        self._state = state
        self._effects = effects
        self._requests = requests
        self._shares = StepShares()

    def pump(self, now: float) -> None:
        """Start what can start: the group that had least of its ranks' time by its weight first (`step_shares`)."""
        busy = self._shares.look(self._stepping())
        for group in busy:
            while len(group.steps) < _most_steps(group) and not self._shares.must_wait(group, busy):
                if not self._send_step(now, group):
                    break

    def on_done(self, now: float, done: StepDone) -> None:
        """Tokens go out, ends are found. A step that failed ends its requests with the reason; the others are not touched."""
        group = self._state.groups.get(done.group_id)
        step = group.steps.pop(done.step, None) if group else None
        if group is None or step is None or group.batcher is None:
            return  # of a group that was lost meanwhile
        began = max(step.sent_at, group.progress_at) if group.batcher.ahead else step.sent_at
        self._state.steps_done += 1
        self._state.last_step_at = group.progress_at = now
        if done.error:
            self._effects.event("step_failed", group.model, f"group {group.id}: {done.error}")
            for sequence in step.plan.members:
                if not sequence.ended:
                    text = f"model `{group.model}`: the step failed: {done.error}"
                    self._requests.finish(sequence.request.key, "error", ErrorCode.INTERNAL, text)
        results = group.batcher.finish(step.plan, done)
        for sequence, token in results:
            self._requests.token(now, group, sequence, token)
        elapsed = max(now - began, 1e-6)
        self._shares.charge(group, step.sent_at, now, self._stepping())
        speed = len(results) * group.wanted.placement.pipeline_parallel / elapsed
        group.tokens_per_s += _SPEED_WEIGHT * (speed - group.tokens_per_s)

    def stalled_s(self, now: float) -> float:
        """For how long a group has had requests in flight and ended no step; 0 when none has (rule 11)."""
        busy = [
            group
            for group in self._state.groups.values()
            if group.batcher is not None and not group.hosted and (group.batcher.busy or group.steps)
        ]
        return max((now - group.progress_at for group in busy), default=0.0)

    def _stepping(self) -> list[Group]:
        """Loaded groups whose steps are sent from here."""
        return [group for group in self._state.groups.values() if group.batcher is not None and not group.hosted]

    def _send_step(self, now: float, group: Group) -> bool:
        assert group.batcher is not None
        self._expire_queue(now, group)
        group.batcher.order(now)
        plan = group.batcher.plan()
        if plan is None:
            return False
        released, group.batcher.released = tuple(group.batcher.released), []
        step = Step(step=self._state.next_step, group_id=group.id, sequences=plan.sequences, released=released)
        self._state.next_step += 1
        group.steps[step.step] = StepInFlight(plan, now)
        for rank in group.ranks:
            self._effects.send(rank, step)
        return True

    def _expire_queue(self, now: float, group: Group) -> None:
        """Rule 10: who waited too long is not even started."""
        assert group.batcher is not None
        for sequence in list(group.batcher.waiting):
            deadline = sequence.request.deadline
            if deadline is not None and deadline <= now:
                text = f"model `{group.model}`: the deadline passed in the queue"
                self._requests.finish(sequence.request.key, "error", ErrorCode.DEADLINE, text)


def _most_steps(group: Group) -> int:
    """In flight at once. Memory that is called back, or that somebody lacks, comes from sequences that are not computed."""
    assert group.batcher is not None
    short = group.reclaim_to is not None or group.batcher.short_blocks > 0
    return group.wanted.placement.pipeline_parallel + (0 if short else group.batcher.ahead)
