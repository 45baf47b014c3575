from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sites import GIB, model, node

from placement.defragment import Room, largest_island, make_room
from placement.packing import place
from placement.types import Device, ModelRequest, PlacedGroup, Snapshot


def on(name: str, rank: int, gib: float = 10) -> PlacedGroup:
    return PlacedGroup(name, "p", (rank,), 1, 1, (int(gib * GIB),))


def site(devices: tuple[Device, ...], *groups: PlacedGroup, **fields: object) -> Snapshot:
    names = dict.fromkeys(group.model for group in groups)
    counts = Counter(group.model for group in groups)
    models = tuple(model(name, 9, replicas=counts[name], **fields) for name in names)
    return Snapshot(devices, models, groups)


WIDE = model("wide", 60, tensor_parallel=4)


def test_room_that_is_there_needs_no_move() -> None:
    room = make_room(site(node("p", "n", 8, 24), on("a", 0)), WIDE, 4)
    assert room is not None
    assert room.moves == ()
    assert 0 not in room.group.ranks


def test_one_move_frees_an_island() -> None:
    devices = node("p", "n0", 4, 24) + node("p", "n1", 4, 24, first_rank=4)
    crowded = site(devices, on("a", 0), on("b", 4), on("c", 5), on("d", 6))
    assert largest_island(crowded, 16 * GIB) == 3
    room = make_room(crowded, WIDE, 4)
    assert room is not None
    assert set(room.group.ranks) == {0, 1, 2, 3}
    (move,) = room.moves
    assert move.before.model == "a"
    assert move.after.ranks[0] >= 4
    assert move.bytes > 9 * GIB
    assert move.seconds > 1


@pytest.mark.parametrize("how", ["pinned", "busy"])
def test_pinned_and_busy_models_stay(how: str) -> None:
    devices = node("p", "n0", 4, 24) + node("p", "n1", 4, 24, first_rank=4)
    crowded = site(devices, on("a", 0), on("b", 4), on("c", 5))
    if how == "pinned":
        crowded = replace(crowded, models=tuple(replace(each, pinned=each.name == "a") for each in crowded.models))
    room = make_room(crowded, WIDE, 4, busy=("a",) if how == "busy" else ())
    assert room is not None
    assert {move.before.model for move in room.moves} == {"b", "c"}
    assert make_room(crowded, WIDE, 4, busy=("a", "b")) is None


def test_the_island_shares_no_device_with_a_replica_that_is_there() -> None:
    devices = node("p", "n0", 4, 80) + node("p", "n1", 4, 80, first_rank=4)
    there = PlacedGroup("wide", "p", (0, 1, 2, 3), 4, 1, (16 * GIB,) * 4)
    crowded = site(devices[:4] + tuple(replace(device, capacity_bytes=24 * GIB) for device in devices[4:]), on("a", 4), there)
    room = make_room(replace(crowded, models=(*crowded.models[:1], WIDE)), WIDE, 4)
    assert room is not None
    assert set(room.group.ranks) == {4, 5, 6, 7}
    assert [move.before.model for move in room.moves] == ["a"]
    assert make_room(Snapshot(devices[:4], (WIDE,), (there,)), WIDE, 4) is None


def test_a_replica_does_not_move_to_another_one() -> None:
    """Rank 4 has most room for it; what is left is rank 5."""
    devices = node("p", "n0", 4, 24) + node("p", "n1", 1, 80, first_rank=4) + node("p", "n2", 1, 12, first_rank=5)
    room = make_room(site(devices, on("a", 0), on("a", 4)), WIDE, 4)
    assert room is not None
    assert [(move.before.ranks, move.after.ranks) for move in room.moves] == [((0,), (5,))]
    single = {"tensor_parallel": 1, "pipeline_parallel": 1}
    assert make_room(site(devices[:5], on("a", 0), on("a", 4), **single), WIDE, 4) is None


def test_no_room_is_no_answer() -> None:
    full = site(node("p", "n", 4, 24), *(on(f"m{rank}", rank, 20) for rank in range(4)))
    assert make_room(full, WIDE, 4) is None
    assert make_room(site(node("p", "n", 2, 24)), WIDE, 4) is None


def after(snapshot: Snapshot, room: Room) -> tuple[PlacedGroup, ...]:
    left = Counter(snapshot.placed) - Counter(move.before for move in room.moves)
    return (*left.elements(), *(move.after for move in room.moves), room.group)


@st.composite
def fragmented(draw: st.DrawFn) -> tuple[Snapshot, ModelRequest, int]:
    devices: tuple[Device, ...] = ()
    for index in range(draw(st.integers(1, 3))):
        devices += node("p", f"n{index}", 4, 24, first_rank=4 * index)
    models = [
        model(
            f"m{index}",
            draw(st.sampled_from([2, 4, 7, 10])),
            tensor_parallel=draw(st.sampled_from([1, 1, 2])),
            replicas=draw(st.sampled_from([1, 1, 2])),
        )
        for index in range(draw(st.integers(0, 14)))
    ]
    snapshot = Snapshot(devices, tuple(models))
    placed = place(snapshot).groups
    degree = draw(st.sampled_from([1, 2, 4]))
    return replace(snapshot, placed=placed), model("wide", draw(st.sampled_from([8, 30, 60])), tensor_parallel=degree), degree


@settings(max_examples=80, deadline=None)
@given(fragmented())
def test_moves_are_sound(case: tuple[Snapshot, ModelRequest, int]) -> None:
    """rule 3: afterwards no device is over capacity, nothing is lost, replicas share none, and the island is one."""
    snapshot, wide, degree = case
    room = make_room(snapshot, wide, degree)
    if room is None:
        assert wide.name in place(replace(snapshot, models=(*snapshot.models, replace(wide, pipeline_parallel=1)))).refusals
        return
    taken: Counter[int] = Counter()
    groups = after(snapshot, room)
    assert Counter(group.model for group in groups) == Counter(group.model for group in (*snapshot.placed, room.group))
    for group in groups:
        for rank, size in zip(group.ranks, group.bytes_per_rank, strict=True):
            taken[rank] += size
    assert all(taken[device.rank] <= device.capacity_bytes for device in snapshot.devices)
    assert max(Counter((group.model, rank) for group in groups for rank in group.ranks).values()) == 1
    assert len({rank // 4 for rank in room.group.ranks}) == 1
    assert len(room.group.ranks) == degree
