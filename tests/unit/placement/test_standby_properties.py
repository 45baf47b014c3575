"""Models that take turns: in whatever order they come, there is always a way to bring each of them in, and no arrival ends it."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from sites import GIB, model, node

from placement.packing import place
from placement.types import Device, ModelRequest, PlacedGroup, Plan, Snapshot


def site(*models: ModelRequest, devices: int = 1, gib: float = 10, standby: float = 100, placed: tuple = ()) -> Snapshot:
    return Snapshot(node("p", "n", devices, gib, kind="cpu", standby_bytes=int(standby * GIB)), models, placed)


def where(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {group.model: group.ranks for group in plan.groups}


def test_a_pinned_model_that_comes_late_does_not_bar_what_takes_turns() -> None:
    """It would fit beside the one that has memory of its own, but then the other could never be brought in again."""
    first = place(site(model("a", 4)))
    before = place(site(model("a", 4), model("b", 8), placed=first.groups))
    assert set(where(before)) == {"a", "b"}
    after = place(site(model("a", 4), model("b", 8), model("p", 3, pinned=True), placed=before.groups))
    assert where(after) == where(before)
    assert "p" in after.refusals
    small = place(site(model("a", 4), model("b", 8), model("p", 0.5, pinned=True), placed=before.groups))
    assert set(where(small)) == {"a", "b", "p"}
    elsewhere = place(site(model("a", 4), model("b", 8), model("p", 3, pinned=True), devices=2, placed=before.groups))
    assert where(elsewhere) == {**where(before), "p": (1,)}


def test_a_model_that_comes_late_does_not_take_the_host_memory_of_what_takes_turns() -> None:
    first = place(site(model("a", 2)))
    before = place(site(model("a", 2), model("b", 8), standby=13, placed=first.groups))
    assert set(where(before)) == {"a", "b"}
    after = place(site(model("a", 2), model("b", 8), model("c", 6), standby=13, placed=before.groups))
    assert where(after) == where(before)
    assert "c" in after.refusals


@st.composite
def sites(draw: st.DrawFn) -> Snapshot:
    devices: list[Device] = []
    for pool in range(draw(st.integers(1, 2))):
        count = draw(st.integers(1, 3))
        standby = draw(st.sampled_from([0, 10, 100]))
        devices += node(f"p{pool}", f"n{pool}", count, draw(st.sampled_from([8, 24])), kind="cpu", standby_bytes=standby * GIB)
    models = [
        model(
            f"m{index}",
            draw(st.sampled_from([0.5, 3, 5, 7, 15])),
            replicas=draw(st.integers(1, 2)),
            tensor_parallel=draw(st.sampled_from([1, 1, 2])),
            priority=draw(st.integers(0, 2)),
            pinned=draw(st.booleans()),
        )
        for index in range(draw(st.integers(1, 7)))
    ]
    return Snapshot(tuple(devices), tuple(models))


def check(snapshot: Snapshot, plan: Plan) -> None:
    """Each group can be in memory, beside those that never leave; those that take turns have host memory to stand by in."""
    requests = {request.name: request for request in snapshot.models}
    standing: dict[str, int] = defaultdict(int)
    for device in snapshot.devices:
        on = [group for group in plan.groups if group.pool == device.pool and device.rank in group.ranks]
        size = {group: group.bytes_per_rank[group.ranks.index(device.rank)] for group in on}
        pinned = sum(size[group] for group in on if requests[group.model].pinned)
        alone = max((size[group] for group in on if not requests[group.model].pinned), default=0)
        assert pinned + alone <= device.capacity_bytes, "a group cannot be brought in"
        assert sum(size[group] for group in on if not group.standby) <= device.capacity_bytes
        assert not any(group.standby and requests[group.model].pinned for group in on)
        standing[device.node] += sum(size[group] for group in on if group.standby)
        models = [group.model for group in on]
        assert len(models) == len(set(models)), "two groups of one model on a device"
    for name in {device.node for device in snapshot.devices}:
        assert standing[name] <= sum(device.standby_bytes for device in snapshot.devices if device.node == name)


@settings(max_examples=60, deadline=None)
@given(snapshot=sites(), seed=st.integers(0, 2**32))
def test_every_group_can_be_brought_in_whatever_the_order(snapshot: Snapshot, seed: int) -> None:
    """Rules 3 and 4."""
    plan = place(snapshot)
    check(snapshot, plan)
    shuffled = list(snapshot.models)
    random.Random(seed).shuffle(shuffled)
    assert place(replace(snapshot, models=tuple(shuffled))) == plan, "the order in which models are listed changed the plan"
    again = place(replace(snapshot, placed=plan.groups))
    assert (set(again.groups), again.loads, again.unloads) == (set(plan.groups), (), ()), "a second look moved something"


@settings(max_examples=60, deadline=None)
@given(snapshot=sites(), data=st.data())
def test_models_that_come_never_drive_out_those_that_are_there(snapshot: Snapshot, data: st.DataObject) -> None:
    """Rules 3 and 4."""
    placed: tuple[PlacedGroup, ...] = ()
    present: tuple[ModelRequest, ...] = ()
    for request in data.draw(st.permutations(snapshot.models)):
        present = (*present, request)
        plan = place(replace(snapshot, models=present, placed=placed))
        check(snapshot, plan)
        there = {(group.model, group.pool, group.ranks) for group in plan.groups}
        assert {(group.model, group.pool, group.ranks) for group in placed} <= there, "an arrival drove out what was there"
        placed = plan.groups
