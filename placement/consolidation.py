"""As few devices as can be: what a planner asks ("how many GPUs do these models need"), not what a running site does.

    1. Pack (`CONSOLIDATE`) in one order of models after the other: by size, then by sizes shaken a little more each round.
    2. While there is room for it in sum: close one device after the other, the lightest first. Its groups move to the others,
       each where it fits tightest; where one fits nowhere it takes the place of a smaller one, which moves on (a bounded
       depth-first search, undone when it leads nowhere). A replica, which the others bar from where they are, also takes
       the place of a larger group that has room elsewhere.
    3. A site with placed groups also starts from these, and of plans with as few devices the one that loads least counts.
    4. Stop at a plan that uses no more devices than the sum of bytes needs, or after the last round; the best one counts.

Groups that were placed before may move; the plan's `kept` are those that did not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from zlib import crc32

from placement.bins import Bins
from placement.packing import Order, Packer
from placement.scoring import CONSOLIDATE
from placement.types import Device, ModelRequest, PlacedGroup, Plan, Snapshot

_SEARCH_STEPS = 4000  # moves tried for one device, about 20 ms


def consolidate(snapshot: Snapshot, rounds: int | None = None, steps: int = _SEARCH_STEPS) -> Plan:
    """Pure and deterministic, as `place`. By default more rounds for small sites, where one device is a large share."""
    if rounds is None:
        rounds = max(8, min(48, 6000 // (len(snapshot.devices) + len(snapshot.models) + 1)))
    before = Counter(snapshot.placed)
    best: tuple[tuple[int, int, int], tuple[PlacedGroup, ...], Plan] | None = None
    for round_ in range(-1 if snapshot.placed else 0, rounds):
        start = snapshot if round_ < 0 else replace(snapshot, placed=())
        plan = Packer(start, CONSOLIDATE).plan(_order(max(round_, 0)))
        bins = Bins(snapshot.devices, snapshot.models, plan.groups)
        while bins.close_one(steps):
            pass
        groups = tuple(sorted(bins.groups(), key=lambda group: (group.model, group.pool, group.ranks)))
        loads = sum(sum(group.bytes_per_rank) for group in (Counter(groups) - before).elements())
        score = (len(plan.refusals), devices_used(groups), loads)
        if best is None or score < best[0]:
            best = (score, groups, plan)
        if best[0][:2] <= (0, devices_needed(snapshot.devices, groups)):
            break
    if best is None:
        raise ValueError("rounds must be 1 or more")
    return _as_plan(best[1], snapshot.placed, best[2])


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
