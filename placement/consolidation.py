"""As few devices as can be: what a planner asks ("how many GPUs do these models need"), not what a running site does.

    1. Pack (`CONSOLIDATE`) in one order of models after the other: by size, then by sizes shaken a little more each round.
    2. While there is room for it in sum: close one device after the other, the lightest first. Its groups move to the others,
       each where it fits tightest; where one fits nowhere it takes the place of a smaller one, which moves on (a bounded
       depth-first search, undone when it leads nowhere). A replica, which the others bar from where they are, also takes
       the place of a larger group that has room elsewhere.
    3. A site with placed groups also starts from these, and of plans with as few devices the one that loads least counts.
    4. Stop at a plan that uses no more devices than the sum of bytes needs, or after the last round; the best one counts.
    5. As long as that is not one of the first sort: pack its groups anew on one device less, chosen by domain
       (`device_sets`).

What all of it may cost is bounded by an effort counted in devices looked at, not by a clock, so that equal sites get equal
plans.

Groups that were placed before may move; the plan's `kept` are those that did not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from zlib import crc32

from placement.bins import Bins
from placement.candidate import Order
from placement.device_sets import on_fewer
from placement.filling import Steps
from placement.packing import Packer
from placement.scoring import CONSOLIDATE
from placement.types import Device, ModelRequest, PlacedGroup, Plan, Snapshot

_SEARCH_STEPS = 4000  # moves tried for one device, about 20 ms
_EFFORT = 6_000_000  # devices looked at in all rounds
_FILL_STEPS = 1_200_000  # sets of groups looked at on one device less


def consolidate(snapshot: Snapshot, rounds: int | None = None, steps: int = _SEARCH_STEPS, effort: int = _EFFORT) -> Plan:
    """Pure and deterministic, as `place`. By default more rounds for small sites, where one device is a large share; no
    further one once `effort` is spent.
    """
    if rounds is None:
        rounds = max(8, min(48, 6000 // (len(snapshot.devices) + len(snapshot.models) + 1)))
    # Nothing takes turns: the question is what all of it needs at once.
    snapshot = replace(snapshot, devices=tuple(replace(device, standby_bytes=0) for device in snapshot.devices))
    before = Counter(snapshot.placed)
    best: _Packed | None = None
    for round_ in range(-1 if snapshot.placed else 0, rounds):
        start = snapshot if round_ < 0 else replace(snapshot, placed=())
        plan = Packer(start, CONSOLIDATE).plan(_order(max(round_, 0)))
        bins = Bins(snapshot.devices, snapshot.models, plan.groups)
        while bins.effort < effort and bins.close_one(steps):
            pass
        effort -= bins.effort
        found = _packed(bins.groups(), plan, before)
        best = found if best is None or found.score < best.score else best
        if best.score[:2] <= (0, devices_needed(snapshot.devices, best.groups)) or effort <= 0:
            break
    if best is None:
        raise ValueError("rounds must be 1 or more")
    return _as_plan(_on_fewer(snapshot, best, before).groups, snapshot.placed, best.plan)


@dataclass(frozen=True)
class _Packed:
    score: tuple[int, int, int]  # models refused, devices used, bytes to load
    groups: tuple[PlacedGroup, ...]
    plan: Plan  # that it came from


def _packed(groups: Iterable[PlacedGroup], plan: Plan, before: Counter[PlacedGroup]) -> _Packed:
    ordered = tuple(sorted(groups, key=lambda group: (group.model, group.pool, group.ranks)))
    loads = sum(sum(group.bytes_per_rank) for group in (Counter(ordered) - before).elements())
    return _Packed((len(plan.refusals), devices_used(ordered), loads), ordered, plan)


def _on_fewer(snapshot: Snapshot, best: _Packed, before: Counter[PlacedGroup]) -> _Packed:
    steps = Steps(_FILL_STEPS)
    needed = devices_needed(snapshot.devices, best.groups)
    while best.score[1] > needed:
        groups = on_fewer(snapshot, best.groups, best.score[1] - 1, steps)
        if groups is None:
            break
        best = _packed(groups, best.plan, before)
    return best


def devices_needed(devices: Iterable[Device], groups: Iterable[PlacedGroup]) -> int:
    """No plan can use fewer: the ranks of the model that has most (its groups share no device), and the bytes of all on the
    largest devices.
    """
    groups = tuple(groups)
    total = sum(sum(group.bytes_per_rank) for group in groups)
    capacities = sorted((device.capacity_bytes - device.foreign_bytes for device in devices), reverse=True)
    needed = 0
    while total > 0 and needed < len(capacities):
        total -= capacities[needed]
        needed += 1
    ranks: Counter[str] = Counter()
    for group in groups:
        ranks[group.model] += len(group.ranks)
    return max([needed, *ranks.values()])


def devices_used(groups: Iterable[PlacedGroup]) -> int:
    return len({(group.pool, rank) for group in groups for rank in group.ranks})


def _as_plan(groups: tuple[PlacedGroup, ...], placed: tuple[PlacedGroup, ...], packed: Plan) -> Plan:
    before, after = Counter(placed), Counter(groups)
    kept = tuple((before & after).elements())
    loads, unloads = tuple((after - before).elements()), tuple((before - after).elements())
    return Plan(groups, kept, loads, unloads, packed.refusals)


def _order(round_: int) -> Order:
    """0: most bytes first; 1: most bytes a rank; 2: widest; then shaken by up to 10 % a round, the same for every run."""
    if round_ == 0:
        return lambda request, single_rank_bytes: (-single_rank_bytes,)
    if round_ == 1:
        return lambda request, single_rank_bytes: (-single_rank_bytes // _width(request),)
    if round_ == 2:
        return lambda request, single_rank_bytes: (-_width(request), -single_rank_bytes // _width(request))

    def shaken(request: ModelRequest, single_rank_bytes: int) -> tuple:
        draw = crc32(f"{round_}:{request.name}".encode()) / 2**32 - 0.5
        return (-single_rank_bytes * (1 + draw * min(1.0, 0.1 * round_)),)

    return shaken


def _width(request: ModelRequest) -> int:
    return (request.tensor_parallel or 1) * (request.pipeline_parallel or 1)
