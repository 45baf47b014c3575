"""A plan that also moves what is placed, where that is the only way to place something: few moves, of idle models only.

    1. Place as ever (`packing.place`): nothing moves without need.
    2. For each model that found no place for want of memory, in order of priority: the cheapest room that moving idle groups
       makes (`defragment.make_room`), at the smallest degree that there is room for.
    3. Place again from there, so that everything is where the packer would keep it.

Large sites are left at step 1: a search over all islands is the planner's then, not the controller's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache

from placement.defragment import make_room
from placement.packing import place
from placement.parallelism import degree_problems, degrees
from placement.scoring import BALANCE, Policy
from placement.speed import slo_problem
from placement.types import Device, ModelRequest, Move, PlacedGroup, Plan, Snapshot

_DEVICES = 64
_MODELS = 2  # that get room in one plan
_TRIALS = 20  # few enough for a controller that decides every second: 90 ms on average where 16 to 64 devices are full


def replan(snapshot: Snapshot, busy: Collection[str] = (), policy: Policy = BALANCE) -> Plan:
    """Pure and deterministic. `busy` names models that must not move now; pinned ones never do."""
    plan = place(snapshot, policy)
    if not plan.refusals or len(snapshot.devices) > _DEVICES:
        return plan
    requests = {request.name: request for request in snapshot.models}
    refused = sorted((requests[name] for name in plan.refusals), key=lambda request: (-request.priority, request.name))
    moves: list[Move] = []
    for request in refused[:_MODELS]:
        found = _room_for(replace(snapshot, placed=plan.groups), request, frozenset(busy))
        if found is None:
            continue
        made, groups = found
        again = place(replace(snapshot, placed=groups), policy)
        if again.unloads:
            continue
        moves += made
        plan = again
    return plan if not moves else _from(snapshot.placed, plan, tuple(moves))


@lru_cache(maxsize=16)
def _room_for(
    snapshot: Snapshot, request: ModelRequest, busy: frozenset[str]
) -> tuple[tuple[Move, ...], tuple[PlacedGroup, ...]] | None:
    for degree in _degrees(request, snapshot.devices):
        room = make_room(snapshot, request, degree, busy, _TRIALS)
        if room is not None and room.moves:
            gone = Counter(move.before for move in room.moves)
            kept = tuple((Counter(snapshot.placed) - gone).elements())
            return room.moves, (*kept, *(move.after for move in room.moves), room.group)
    return None


def _degrees(request: ModelRequest, devices: Iterable[Device]) -> list[int]:
    """Tensor degrees on one stage, the smallest first, that are fast enough somewhere."""
    if degree_problems(request):
        return []
    domains = Counter((device.pool, device.node, device.nvlink_domain) for device in devices if device.healthy)
    kinds = {(device.kind, device.type) for device in devices}
    widest = max(domains.values(), default=0)
    found: set[int] = set()
    for kind, type_ in sorted(kinds):
        if request.device in (None, kind):
            pairs = degrees(request, kind, widest, widest)
            found.update(tensor for tensor, stages in pairs if stages == 1 and not slo_problem(request, tensor, 1, kind, type_))
    return sorted(found)


def _from(placed: tuple[PlacedGroup, ...], plan: Plan, moves: tuple[Move, ...]) -> Plan:
    """The plan as seen from where the groups are now."""
    before, after = Counter(placed), Counter(plan.groups)
    return replace(
        plan,
        kept=tuple((before & after).elements()),
        loads=tuple((after - before).elements()),
        unloads=tuple((before - after).elements()),
        moves=moves,
    )
