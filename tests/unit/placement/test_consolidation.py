from __future__ import annotations

from sites import GIB, model, node

from placement.bins import Bins
from placement.consolidation import consolidate, devices_needed, devices_used
from placement.packing import place
from placement.scoring import CONSOLIDATE
from placement.types import PlacedGroup, Snapshot


def test_what_greedy_packing_misses() -> None:
    """Largest first puts 10 with 8, and then needs a third device; 10+6+6 and 8+8+6 fill two."""
    sizes = (10, 8, 8, 6, 6, 6)
    # Beside the weights: a tenth of them, and 0.4 GiB of graphs, pages and activations.
    models = tuple(model(f"m{index}", (size - 0.5) / 1.1) for index, size in enumerate(sizes))
    snapshot = Snapshot(node("p", "n", 6, 22), models)
    assert devices_used(place(snapshot, CONSOLIDATE).groups) == 3
    assert devices_used(consolidate(snapshot).groups) == 2


def test_wide_groups_move_together() -> None:
    models = (model("wide", 20, tensor_parallel=2, pipeline_parallel=1), *(model(f"s{index}", 9) for index in range(2)))
    plan = consolidate(Snapshot(node("p", "n", 4, 24), models))
    assert devices_used(plan.groups) == 2


def test_a_replica_takes_the_place_of_a_larger_group_that_may_go_where_it_may_not() -> None:
    """Only rank 2 has room, where the other replica is; what fills rank 1 can go there."""
    groups = [
        PlacedGroup(name, "p", (rank,), 1, 1, (size * GIB,)) for name, rank, size in (("r", 0, 5), ("x", 1, 20), ("r", 2, 5))
    ]
    models = (model("r", 4, replicas=2), model("x", 18))
    bins = Bins(node("p", "n", 2, 24) + node("p", "n", 1, 40, first_rank=2), models, groups)
    assert bins.close_one(100)
    assert {(group.model, group.ranks) for group in bins.groups()} == {("r", (1,)), ("r", (2,)), ("x", (2,))}
    assert not bins.close_one(100)


def test_what_did_not_move_is_kept() -> None:
    snapshot = Snapshot(node("p", "n", 4, 24), tuple(model(f"m{index}", 10) for index in range(4)))
    spread = place(snapshot).groups
    plan = consolidate(Snapshot(snapshot.devices, snapshot.models, spread))
    assert devices_used(plan.groups) == 2
    assert len(plan.kept) == 2
    assert len(plan.loads) == len(plan.unloads) == 2
    assert consolidate(Snapshot(snapshot.devices, snapshot.models, plan.groups)).kept == plan.groups


def test_the_bound_counts_bytes_and_width() -> None:
    devices = node("p", "n", 8, 24)
    plan = place(Snapshot(devices, (model("wide", 4, tensor_parallel=8, pipeline_parallel=1), model("m", 20))))
    assert devices_needed(devices, plan.groups) == 8
    plan = place(Snapshot(devices, (model("a", 20), model("b", 20))))
    assert devices_needed(devices, plan.groups) == 2
    plan = place(Snapshot(devices, (model("a", 1, replicas=3),)))
    assert devices_needed(devices, plan.groups) == devices_used(plan.groups) == 3


def test_replicas_are_not_put_together() -> None:
    """Two devices would hold all bytes; three replicas take three, and the others go there."""
    models = (model("a", 2, replicas=3), *(model(f"m{index}", 4) for index in range(3)))
    devices = node("p", "n", 8, 24)
    for placed in ((), place(Snapshot(devices, models)).groups):
        plan = consolidate(Snapshot(devices, models, placed))
        assert devices_used(plan.groups) == 3
        assert len({group.ranks for group in plan.groups if group.model == "a"}) == 3
