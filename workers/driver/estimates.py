"""How long until a group serves, from what its switches took before. Pure."""

from __future__ import annotations

from workers.driver.generations import comes
from workers.driver.group import Group
from workers.driver.pool_state import PoolState

CHECK_ESTIMATE_S = 1.0
LOAD_BASE_S = 3.0
LOAD_BYTES_PER_S = 200 * 2**20  # until a load of the model has been timed
MOVE_BASE_S = 0.02
MOVE_BYTES_PER_S = {"cpu": 1 * 2**30, "cuda": 20 * 2**30}  # of parks and wakes, until one has been timed
DRAIN_S = 1.0  # of a group whose speed is not known


def estimate_s(state: PoolState, now: float, group: Group) -> float:
    """Until the group is ready."""
    match group.state:
        case "checking":
            return CHECK_ESTIMATE_S
        case "waking":
            return max(wake_s(state, group) - (now - group.load_began_at), MOVE_BASE_S)
        case "parking":
            return _drain_s(group) + move_s(state, "park", group) + wake_s(state, group)
        case "parked":
            return wake_s(state, group) + _room_s(state, group)
        case _:
            return _load_s(state, now, group)


def coming_in_s(state: PoolState, now: float, group: Group) -> float | None:
    """The same of one that is on its way, else None: what waits for room, or for a request, may do so for ever."""
    begun = group.state in ("loading", "checking", "waking") and comes(state, group) and (state.ranks_up or group.hosted)
    return estimate_s(state, now, group) if begun else None


def wake_s(state: PoolState, group: Group) -> float:
    if any(held.park_unloads for held in group.held.values()):
        return state.load_times_s.get(group.model, LOAD_BASE_S) + CHECK_ESTIMATE_S
    return move_s(state, "wake", group)


def move_s(state: PoolState, path: str, group: Group) -> float:
    """A park or a wake of so many bytes, at the speed that was last measured."""
    size = max((held.standby_bytes or held.bytes.get("weights", 0) for held in group.held.values()), default=0)
    return MOVE_BASE_S + size / state.move_bytes_per_s.get(path, MOVE_BYTES_PER_S[state.device])


def operation_s(state: PoolState, group: Group, kind: str) -> float:
    """Of one operation, from its beginning. A load may have to convert its weights first, whatever the last one took."""
    if kind == "load":
        return max(state.load_times_s.get(group.model, 0.0), _unmeasured_load_s(group))
    return move_s(state, kind, group) if kind in ("park", "wake") else MOVE_BASE_S


def _load_s(state: PoolState, now: float, group: Group) -> float:
    whole = state.load_times_s.get(group.model, _unmeasured_load_s(group))
    elapsed = now - group.load_began_at if group.state == "loading" else 0.0
    return max(whole - elapsed, whole * (1.0 - group.progress) * 0.5, 0.5) + CHECK_ESTIMATE_S


def _unmeasured_load_s(group: Group) -> float:
    bytes_to_load = max((sum(kinds.values()) for kinds in group.sizing.budget.values()), default=0) if group.sizing else 0
    return LOAD_BASE_S + bytes_to_load / LOAD_BYTES_PER_S


def _room_s(state: PoolState, group: Group) -> float:
    """Until others have made room for its wake; 0 when there is room."""
    needed = {rank: sum(held.wake_bytes.values()) for rank, held in group.held.items()}
    short = {rank for rank, size in needed.items() if size > state.ledger.free(rank)}
    if not short:
        return 0.0
    others = [other for other in state.groups.values() if other.batcher is not None and short & set(other.ranks)]
    return min((move_s(state, "park", other) + _drain_s(other) for other in others), default=0.0)


def _drain_s(group: Group) -> float:
    if group.quiet or not group.outstanding_tokens:
        return 0.0
    return group.outstanding_tokens / group.tokens_per_s if group.tokens_per_s else DRAIN_S
