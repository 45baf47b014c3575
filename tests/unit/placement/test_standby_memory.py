"""Groups that take turns: placed beyond the devices' memory, as far as host memory has room for what stands by."""

from __future__ import annotations

from dataclasses import replace

from sites import GIB, model, node

from placement.consolidation import consolidate, devices_used
from placement.packing import place
from placement.types import PlacedGroup, Snapshot


def _standby(groups: tuple[PlacedGroup, ...]) -> set[str]:
    return {group.model for group in groups if group.standby}


def test_what_does_not_fit_beside_the_others_takes_turns() -> None:
    models = tuple(model(f"m{index}", 9) for index in range(4))
    without = place(Snapshot(node("p", "n", 1, 24), models))
    assert len(without.groups) == 2
    assert len(without.refusals) == 2
    plan = place(Snapshot(node("p", "n", 1, 24, standby_bytes=64 * GIB), models))
    assert not plan.refusals
    assert len(_standby(plan.groups)) == 2


def test_host_memory_has_to_have_room_for_them_and_for_what_leaves() -> None:
    """A group of about 10 GiB that takes turns, and one of 10 GiB that has to leave for it."""
    models = tuple(model(f"m{index}", 9) for index in range(3))
    for gib, refused in ((19, 1), (22, 0)):
        plan = place(Snapshot(node("p", "n", 1, 24, standby_bytes=gib * GIB), models))
        assert len(plan.refusals) == refused


def test_pinned_models_neither_take_turns_nor_make_room() -> None:
    devices = node("p", "n", 1, 24, standby_bytes=100 * GIB)
    pinned = tuple(model(f"p{index}", 9, pinned=True) for index in range(2))
    plan = place(Snapshot(devices, (*pinned, model("large", 10), model("small", 1))))
    assert set(plan.refusals) == {"large"}  # alone with the pinned ones there is no room for it
    three = place(Snapshot(devices, (*pinned, model("p2", 9, pinned=True))))
    assert set(three.refusals) == {"p2"}


def test_ranks_of_a_wide_model_take_turns_together() -> None:
    devices = node("p", "n", 2, 24, standby_bytes=60 * GIB)
    wide = model("wide", 30, tensor_parallel=2, pipeline_parallel=1)
    plan = place(Snapshot(devices, (wide, model("b", 14), model("c", 14))))
    assert not plan.refusals
    taking = next(group for group in plan.groups if group.standby)
    assert taking.model in {"b", "c"}


def test_the_placement_is_kept_and_memory_of_its_own_comes_with_room() -> None:
    devices = node("p", "n", 1, 24, standby_bytes=64 * GIB)
    models = tuple(model(f"m{index}", 9) for index in range(3))
    plan = place(Snapshot(devices, models))
    again = place(Snapshot(devices, models, plan.groups))
    assert again.groups == plan.groups
    assert not again.loads
    assert not again.unloads
    (waiting,) = _standby(plan.groups)
    gone = next(group.model for group in plan.groups if group.model != waiting)
    left = tuple(each for each in models if each.name != gone)
    fewer = place(Snapshot(devices, left, plan.groups))
    assert not _standby(fewer.groups)
    assert not fewer.loads


def test_how_many_devices_a_site_needs_counts_no_turns() -> None:
    devices = node("p", "n", 4, 24, standby_bytes=640 * GIB)
    models = tuple(model(f"m{index}", 9) for index in range(6))
    assert devices_used(consolidate(Snapshot(devices, models)).groups) == 3


def test_a_cordoned_device_takes_nothing_and_gives_up_what_it_has() -> None:
    devices = node("p", "n", 2, 24, standby_bytes=64 * GIB)
    models = (model("a", 9),)
    placed = place(Snapshot(devices, models)).groups
    cordoned = tuple(replace(device, cordoned=device.rank in placed[0].ranks) for device in devices)
    plan = place(Snapshot(cordoned, models, placed))
    assert plan.unloads == placed
    assert plan.loads[0].ranks != placed[0].ranks
