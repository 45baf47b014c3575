"""Which operation has been silent for so long that a rank of it must be stopped or hang, also where nobody asks for anything.

Silent: no rank of it has said how far it is, or that it is done. What is expected comes from `estimates`. The floors are far
above what an overloaded machine needs, since the answer is to start all ranks of the pool anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.driver.estimates import operation_s
from workers.driver.group import MAX_ATTEMPTS, Group, Op
from workers.driver.pool_state import PoolState

FACTOR = 10.0  # of the estimate
FLOOR_S = 60.0
BUSY_FLOOR_S = 120.0  # behind steps: what comes in order with them waits for them
LOAD_FLOOR_S = {"cpu": 180.0, "cuda": 600.0}  # imports, digests of files; on GPUs kernels that are compiled
_PAUSE_S = 1.0  # of this process, whose reports from ranks wait to be read


@dataclass(frozen=True)
class Silent:
    group: Group
    op: Op
    reason: str


class Overdue:
    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._looked_at: float | None = None

    def look(self, now: float) -> Silent | None:
        """Called several times a second. Time in which it was not called, because this process stood still, does not count."""
        paused_s = now - self._looked_at if self._looked_at is not None else 0.0
        self._looked_at = now
        for op in self._state.ops.values():
            group = self._state.groups[op.group_id]
            if group.hosted:
                continue  # its engine's process has deadlines of its own
            if op.heard_at is None:
                op.heard_at = now
            elif paused_s > _PAUSE_S:
                op.heard_at += paused_s
            silent_s, expected_s = now - op.heard_at, operation_s(self._state, group, op.kind)
            if silent_s > max(FACTOR * expected_s, self._floor_s(group, op)):
                ranks = ", ".join(map(str, sorted(op.pending)))
                who = f"rank {ranks} does" if len(op.pending) == 1 else f"ranks {ranks} do"
                what = f"the {op.kind} of `{group.model}` (group {group.id})"
                return Silent(
                    group,
                    op,
                    f"{who} not answer: {what} has been silent for {silent_s:.0f} s, about {expected_s:.1f} s were expected",
                )
        return None

    def _floor_s(self, group: Group, op: Op) -> float:
        if op.kind == "load":
            return LOAD_FLOOR_S[self._state.device]
        busy = any(other.steps for other in self._state.groups.values() if not set(other.ranks).isdisjoint(group.ranks))
        return BUSY_FLOOR_S if busy else FLOOR_S


def is_given_up(silent: Silent) -> bool:
    """Counts a load as an attempt, and says whether it was the last: each costs all models of the pool their ranks."""
    group = silent.group
    if silent.op.kind != "load":
        return False
    group.attempts += 1
    if group.attempts < MAX_ATTEMPTS:
        return False
    tail = f"attempt {group.attempts} of {MAX_ATTEMPTS}; `yard wake {group.model}` or a change of the model tries again"
    group.reason = f"loading failed: {silent.reason} ({tail})"
    return True
