"""Two generations of a model in one pool: what served before stays at hand until what replaces it has proved itself. Pure.

Where both fit, the new one loads beside the old, which serves until then. Where they do not, the old one gives way: it parks, or
is unloaded where its engine cannot park, and is kept. When the new one fails, the old one comes back, and the new one is tried
again only when somebody changes the model: each attempt would take away what serves.
"""

from __future__ import annotations

from workers.driver.group import Group
from workers.driver.pool_state import PoolState
from workers.driver.residency import STANDING_BY


def replacement_comes(state: PoolState, old: Group) -> bool:
    """There is a newer generation, and it has not proved itself yet."""
    newer = [other for other in state.of_model(old.model) if not other.unwanted]
    return bool(newer) and not any(other.state == "ready" or (other.proven and other.state in STANDING_BY) for other in newer)


def kept(state: PoolState, group: Group) -> bool:
    """An old generation that served, and may have to serve again."""
    spent = group.state == "failed" and group.retry_at is None
    return group.unwanted and group.proven and not spent and replacement_comes(state, group)


def stands_in(state: PoolState, group: Group) -> bool:
    """An old generation that serves because no newer one can now."""
    newer = [other for other in state.of_model(group.model) if not other.unwanted]
    away = all(other.state == "failed" or (other.state == "waiting" and not other.reclaiming) for other in newer)
    return group.unwanted and group.proven and bool(newer) and away


def comes(state: PoolState, group: Group) -> bool:
    return not group.unwanted or stands_in(state, group)


def gave_way(state: PoolState, wanting: Group) -> list[Group]:
    """Old generations that left memory for its sake."""
    if wanting.unwanted:
        return []
    return [other for other in state.of_model(wanting.model) if other.unwanted and other.gives_way]


def in_the_way(state: PoolState, wanting: Group) -> list[Group]:
    """Old generations on its ranks that have memory, and can give it up."""
    if wanting.unwanted:
        return []
    return [
        other
        for other in state.of_model(wanting.model)
        if other.unwanted
        and not set(other.ranks).isdisjoint(wanting.ranks)
        and (other.state == "ready" or (other.state == "parked" and other.op is None and state.ledger.of_owner(other.id)))
    ]
