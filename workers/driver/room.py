"""Who wants to be in a pool's memory, and who leaves it for whom. Pure decisions over its state; `switching` acts on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from placement.parking import TURN_S, Resident, Wanting, make_room
from workers.driver.estimates import wake_s
from workers.driver.group import Group
from workers.driver.pool_state import PoolState
from workers.driver.residency import Situation, decide
from workers.memory.ledger import Shortage


def failed_to_park(now: float, group: Group) -> bool:
    """A moment ago; it is not tried again at once."""
    return group.park_retry_at is not None and now < group.park_retry_at


def asked(state: PoolState, group: Group) -> bool:
    """Requests are held for its model, somebody asked for it by name or could not wait, or its other replicas are full."""
    pinned = group.spec.residency == "resident"  # since a moment ago, or it would not stand by
    return group.wake_asked or pinned or bool(state.held.get(group.model)) or _short_of_replicas(state, group)


def _short_of_replicas(state: PoolState, group: Group) -> bool:
    """All that serve of its model have as much as they run at once, and more."""
    serving = [other for other in state.of_model(group.model) if other.state == "ready" and other is not group]
    return bool(serving) and all(other.full for other in serving)


def _waited_s(state: PoolState, now: float, group: Group) -> float:
    since = [held.since for held in state.held.get(group.model, ())]
    if group.wake_asked_at is not None:
        since.append(group.wake_asked_at)
    return now - min(since, default=now)


def situation(state: PoolState, group: Group) -> Situation:
    others = [other for other in state.of_model(group.model) if other is not group]
    return Situation(
        pinned=group.spec.residency == "resident" and not group.gives_way,
        parkable=group.gives_way or all(held.parkable for held in group.held.values()),
        operating=any(other.op is not None and other.op.kind != "kv" for other in others),
        asked=asked(state, group),
        bringing=not group.wake_asked
        and any(
            other.state in ("waiting", "loading", "checking", "waking") and other.unwanted == group.unwanted for other in others
        ),
    )


def going(state: PoolState, wanting: Group) -> list[Group]:
    """Groups that are on their way out, and will leave room."""
    return [group for group in state.groups.values() if group.state == "parking" and group is not wanting]


def who_leaves(
    state: PoolState, now: float, wanting: Group, shortages: Iterable[Shortage], leaving: Iterable[Group]
) -> list[Group] | None:
    """Besides `leaving`; None when all that may would not do."""
    asks = Wanting(wanting.spec.priority, asked(state, wanting), _waited_s(state, now, wanting))
    chosen = make_room(_residents(state, now, wanting), asks, _missing(state, shortages, leaving))
    return None if chosen is None else [state.groups[group_id] for group_id in chosen]


def who_is_idle(
    state: PoolState, now: float, starving: Group, shortages: Iterable[Shortage], leaving: Iterable[Group]
) -> list[Group]:
    """Besides `leaving`, of no higher priority, and unused for `TURN_S`. Empty when that would not do."""
    residents = [each for each in _residents(state, now, starving) if each.idle_s >= TURN_S and each.ready_s >= TURN_S]
    asks = Wanting(starving.spec.priority, asked=False, waited_s=0.0)
    chosen = make_room(residents, asks, _missing(state, shortages, leaving))
    return [state.groups[group_id] for group_id in chosen or ()]


def _missing(state: PoolState, shortages: Iterable[Shortage], leaving: Iterable[Group]) -> dict[int, int]:
    """Bytes by rank that are short once `leaving` have left."""
    missing = {shortage.rank: shortage.asked_bytes - shortage.free_bytes for shortage in shortages}
    for group in leaving:
        for rank, size in state.ledger.of_owner(group.id).items():
            if rank in missing:
                missing[rank] -= size
    return missing


def fits_if_asked_for(state: PoolState, now: float, group: Group, shortages: Iterable[Shortage]) -> bool:
    """What is in its way may leave for somebody who waits."""
    missing = {shortage.rank: shortage.asked_bytes - shortage.free_bytes for shortage in shortages}
    asks = Wanting(group.spec.priority, asked=True, waited_s=0.0)
    return make_room(_residents(state, now, group), asks, missing) is not None


def _residents(state: PoolState, now: float, wanting: Group) -> Iterator[Resident]:
    """Groups that may be parked for it."""
    for group in state.groups.values():
        if group.model == wanting.model or group.state != "ready" or failed_to_park(now, group):
            continue
        if isinstance(decide(group.state, "park", situation(state, group)), str):
            continue
        yield Resident(
            group_id=group.id,
            bytes=state.ledger.of_owner(group.id),
            quiet=group.op is None and not group.wanted_by_somebody,  # copies that nobody waits for end with the park
            idle_s=now - max(group.used_at, group.ready_since),
            ready_s=now - group.ready_since,
            priority=group.spec.priority,
            keep_warm_s=group.spec.keep_warm_s,
            wake_s=wake_s(state, group),
        )
