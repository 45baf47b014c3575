"""What holds for every site: drawn at random, and shrunk to the smallest that breaks it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from sites import model, node

from placement.consolidation import consolidate, devices_needed, devices_used
from placement.packing import place
from placement.scoring import BALANCE, CONSOLIDATE
from placement.types import Device, ModelRequest, PlacedGroup, Plan, Snapshot

degrees = st.sampled_from([None, None, 1, 2, 4])


@st.composite
def sites(draw: st.DrawFn) -> Snapshot:
    devices: list[Device] = []
    for pool in range(draw(st.integers(1, 3))):
        first = 0
        for index in range(draw(st.integers(1, 3))):
            count = draw(st.sampled_from([1, 2, 4]))
            size = draw(st.sampled_from([8, 24, 80]))
            kind = "cuda" if pool < 2 else "cpu"
            cordoned = draw(st.integers(0, 9)) == 0
            sockets = draw(st.sampled_from([0, 1, 2]))
            cards = node(f"p{pool}", f"n{pool}-{index}", count, size, first, kind=kind, cordoned=cordoned)
            devices += [replace(card, numa=card.rank % sockets if sockets else -1) for card in cards]
            first += count
    models: list[ModelRequest] = []
    for index in range(draw(st.integers(1, 8))):
        models.append(
            model(
                f"m{index}",
                draw(st.sampled_from([0.5, 3, 7, 15, 40, 100])),
                replicas=draw(st.integers(0, 3)),
                tensor_parallel=draw(degrees),
                pipeline_parallel=draw(degrees),
                priority=draw(st.integers(0, 2)),
                pinned=draw(st.booleans()),
                pools=draw(st.sampled_from([(), (), ("p0",), ("p0", "p1")])),
            )
        )
    return Snapshot(tuple(devices), tuple(models))


def share_a_device(groups: Iterable[PlacedGroup]) -> bool:
    """Whether two groups of one model do."""
    places = Counter((group.model, group.pool, rank) for group in groups for rank in group.ranks)
    return any(count > 1 for count in places.values())


policies = st.sampled_from([BALANCE, CONSOLIDATE])


def check(snapshot: Snapshot, plan: Plan) -> None:
    devices = {(device.pool, device.rank): device for device in snapshot.devices}
    requests = {request.name: request for request in snapshot.models}
    taken: Counter[tuple[str, int]] = Counter()
    for group in plan.groups:
        request = requests[group.model]
        assert len(set(group.ranks)) == len(group.ranks) == group.tensor_parallel * group.pipeline_parallel
        assert len(group.bytes_per_rank) == len(group.ranks)
        assert request.tensor_parallel in (None, group.tensor_parallel)
        assert request.pipeline_parallel in (None, group.pipeline_parallel)
        assert not request.pools or group.pool in request.pools
        for stage in range(group.pipeline_parallel):
            shards = group.ranks[stage * group.tensor_parallel : (stage + 1) * group.tensor_parallel]
            assert len({devices[group.pool, rank].node for rank in shards}) == 1
        for rank, size in zip(group.ranks, group.bytes_per_rank, strict=True):
            assert not devices[group.pool, rank].cordoned
            taken[group.pool, rank] += size
    for place_, size in taken.items():
        assert size <= devices[place_].capacity_bytes - devices[place_].foreign_bytes
    counts = Counter(group.model for group in plan.groups)
    for name, request in requests.items():
        assert counts[name] <= request.replicas
        assert (counts[name] < request.replicas) == (name in plan.refusals)


@settings(max_examples=150, deadline=None)
@given(sites(), policies)
def test_no_device_is_ever_over_capacity_and_every_group_is_whole(snapshot: Snapshot, policy) -> None:
    """rule 3: on all ranks or none, never more than there is."""
    check(snapshot, place(snapshot, policy))


@settings(max_examples=100, deadline=None)
@given(sites(), policies, st.randoms(use_true_random=False))
def test_the_order_of_what_is_listed_does_not_matter(snapshot: Snapshot, policy, shuffler: random.Random) -> None:
    """rule 4: the order in which models load must not change the result."""
    plan = place(snapshot, policy)
    devices, models, placed = list(snapshot.devices), list(snapshot.models), list(plan.groups)
    for part in (devices, models, placed):
        shuffler.shuffle(part)
    assert place(Snapshot(tuple(devices), tuple(models)), policy) == plan
    again = place(Snapshot(tuple(devices), tuple(models), tuple(placed)), policy)
    assert again.kept == again.groups
    assert sorted(again.groups, key=repr) == sorted(plan.groups, key=repr)


@settings(max_examples=100, deadline=None)
@given(sites(), sites(), policies)
def test_replanning_keeps_what_it_can_and_accounts_for_all(before: Snapshot, after: Snapshot, policy) -> None:
    placed = place(before, policy).groups
    snapshot = replace(after, placed=placed)
    plan = place(snapshot, policy)
    check(snapshot, plan)
    assert Counter(plan.kept) + Counter(plan.unloads) == Counter(placed)
    assert Counter(plan.kept) + Counter(plan.loads) == Counter(plan.groups)


@settings(max_examples=150, deadline=None)
@given(sites(), sites(), policies)
def test_no_two_replicas_of_a_model_share_a_device(before: Snapshot, after: Snapshot, policy) -> None:
    """Placed at once, after a change, and where placed groups shared devices before."""
    first, second = place(before, policy).groups, place(after, policy).groups
    assert not share_a_device(first)
    assert not share_a_device(place(replace(after, placed=(*first, *second)), policy).groups)
    assert not share_a_device(consolidate(replace(after, placed=first), rounds=2).groups)


@settings(max_examples=100, deadline=None)
@given(sites(), policies)
def test_a_refused_replica_names_the_devices_of_the_others(snapshot: Snapshot, policy) -> None:
    plan = place(snapshot, policy)
    for name, reasons in plan.refusals.items():
        holders = {(group.pool, rank) for group in plan.groups if group.model == name for rank in group.ranks}
        named = {(reason.pool, reason.rank) for reason in reasons if reason.code == "replica_here" and reason.rank is not None}
        assert named == holders
        for reason in reasons[1:]:
            if reason.code == "replica_here" and reason.rank is None:
                assert reason.pool in {pool for pool, _ in holders}


@settings(max_examples=100, deadline=None)
@given(sites(), policies)
def test_a_refused_single_rank_model_truly_has_no_device(snapshot: Snapshot, policy) -> None:
    plan = place(snapshot, policy)
    free = {(device.pool, device.rank): device.capacity_bytes for device in snapshot.devices if not device.cordoned}
    for group in plan.groups:
        for rank, size in zip(group.ranks, group.bytes_per_rank, strict=True):
            free[group.pool, rank] -= size
    for request in snapshot.models:
        if request.name in plan.refusals and request.tensor_parallel == request.pipeline_parallel == 1:
            alone = place(Snapshot(node("x", "x", 1, 1000), (replace(request, pools=(), replicas=1),)))
            (need,) = alone.groups[0].bytes_per_rank
            holders = {(group.pool, group.ranks[0]) for group in plan.groups if group.model == request.name}
            allowed = [
                size
                for (pool, rank), size in free.items()
                if (not request.pools or pool in request.pools) and (pool, rank) not in holders
            ]
            assert all(size < need for size in allowed)


@settings(max_examples=60, deadline=None)
@given(sites())
def test_consolidation_is_valid_and_never_uses_more_devices(snapshot: Snapshot) -> None:
    plan = consolidate(snapshot, rounds=3)
    check(snapshot, plan)
    packed = place(snapshot, CONSOLIDATE)
    assert (len(plan.refusals), devices_used(plan.groups)) <= (len(packed.refusals), devices_used(packed.groups))
    assert devices_used(plan.groups) >= devices_needed(snapshot.devices, plan.groups)
    assert consolidate(snapshot, rounds=3) == plan
