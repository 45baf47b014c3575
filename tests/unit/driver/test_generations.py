"""A new generation in a pool that holds one of both: what served is not lost before the new one has proved itself."""

from __future__ import annotations

import pytest
from pool_world import FACTS, HELD_MIB, LOAD_MIB, MIB, World, expected_text
from pool_world import wanted as plain

from gateway.api.config import KvSpec
from gateway.api.errors import ErrorCode
from placement.parking import TURN_S
from workers.driver.group import MAX_ATTEMPTS, Wanted
from workers.driver.sizing import size_group
from workers.messages import LoadShard

FLOOR_MIB = 64
ONE_FITS_MIB = LOAD_MIB - 16 + FLOOR_MIB + 4
KINDS = ["auto", "resident", "unparkable"]


def wanted(model: str = "a", **changes: object) -> Wanted:
    return plain(model, **{"kv": KvSpec(floor=FLOOR_MIB * MIB, block_tokens=16), **changes})  # type: ignore[arg-type]


def newer(residency: str, **changes: KvSpec | int) -> Wanted:
    return wanted("a", generation=2, context=128, residency=residency, **changes)


def serving(kind: str) -> tuple[World, str]:
    """`a` of generation 1 serves."""
    world = World(capacity_mib=ONE_FITS_MIB)
    world.ranks[0].parkable = kind != "unparkable"
    residency = "resident" if kind == "resident" else "auto"
    world.ready(wanted(residency=residency))
    return world, residency


def generations(world: World) -> dict[int, str]:
    return {group.wanted.generation: group.state for group in world.core.state.of_model("a")}


def answered(world: World) -> bool:
    key = world.submit(model="a", max_tokens=2)
    world.run()
    world.later(0.1)
    return world.texts.get(key) == expected_text((1, 2, 3), 2)


def loads(world: World) -> int:
    return sum(isinstance(command, LoadShard) for _, command in world.sent)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["load", "canary"])
def test_a_new_generation_that_fails_gives_the_old_one_its_place_back(kind: str, fault: str) -> None:
    """Rule 8: it never proved itself, so what did serves on, until somebody changes the model again."""
    world, residency = serving(kind)
    old = world.group("a")
    if fault == "load":
        world.ranks[0].load_error = "corrupt"
    else:
        world.canary_problem["a"] = "the canary was answered 'Lyon'"
    world.assign(newer(residency))
    held = world.submit(model="a", max_tokens=2)
    while generations(world).get(2) != "failed":
        assert world.turn()
    world.ranks[0].load_error, world.canary_problem = "", {}
    world.run()
    assert generations(world) == {1: "ready", 2: "failed"}
    assert old in world.core.state.groups.values()
    new = next(group for group in world.core.state.of_model("a") if group is not old)
    assert ("corrupt" if fault == "load" else "Lyon") in new.reason
    assert "generation 1 serves" in new.reason
    assert world.texts[held] == expected_text((1, 2, 3), 2), "who was held while both were away has an answer"
    before = loads(world)
    for _ in range(20):
        world.later(5)
        assert answered(world)
    assert loads(world) == before, "each further attempt would take the old one away again"

    world.assign(newer(residency, priority=1))
    assert generations(world) == {1: "ready", 2: "failed"}, "the same generation: nobody changed the spec"
    again = wanted(generation=3, context=128, residency=residency)
    world.assign(again)
    world.run()
    world.later(0.1)
    assert generations(world) == {3: "ready"}
    assert answered(world)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_generation_takes_the_place_of_the_old_where_both_do_not_fit(kind: str) -> None:
    world, residency = serving(kind)
    world.assign(newer(residency))
    keys = [world.submit((1, seed), model="a", max_tokens=3) for seed in range(4)]
    world.run()
    assert generations(world) == {2: "ready"}
    assert [world.texts[key] for key in keys] == [expected_text((1, seed), 3) for seed in range(4)]
    assert len(world.ranks[0].shards) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_that_goes_back_has_the_old_group_as_it_was(kind: str) -> None:
    world, residency = serving(kind)
    old = world.group("a").id
    world.ranks[0].load_error = "corrupt"
    world.assign(newer(residency))
    while generations(world).get(2) != "failed":
        assert world.turn()
    world.ranks[0].load_error = ""
    world.assign(wanted(generation=3, residency=residency))
    world.run()
    assert (world.group("a").id, generations(world)) == (old, {3: "ready"})
    assert answered(world)


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_mind_at_any_moment_ends_in_what_was_asked_for_last(kind: str, turns: int) -> None:
    world, residency = serving(kind)
    world.assign(newer(residency))
    for _ in range(turns):
        world.turn()
    world.assign(wanted(generation=3, residency=residency))
    world.run()
    assert generations(world) == {3: "ready"}
    assert answered(world)


def test_an_old_generation_whose_park_fails_is_unloaded_instead() -> None:
    world, _ = serving("auto")
    world.ranks[0].park_error = "no host memory"
    world.assign(newer("auto"))
    world.run()
    assert generations(world) == {2: "ready"}


@pytest.mark.parametrize("kind", KINDS)
def test_when_the_old_one_cannot_come_back_both_are_tried_a_bounded_number_of_times(kind: str) -> None:
    world, residency = serving(kind)
    world.ranks[0].load_error = world.ranks[0].wake_error = "disk gone"
    world.assign(newer(residency))
    for _ in range(40):
        world.run()
        world.later(10)
    assert loads(world) <= 1 + 2 * MAX_ATTEMPTS
    key = world.submit(model="a")
    assert world.error(key) == ErrorCode.UNAVAILABLE
    assert "disk gone" in world.ends[key].error_message
    assert world.core.state.ledger.used(0) == 0
    world.ranks[0].load_error = world.ranks[0].wake_error = ""
    world.assign(wanted(generation=3, context=128, residency=residency))
    world.run()
    assert answered(world)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_generation_that_fits_in_no_way_leaves_the_old_one_alone(kind: str) -> None:
    world, residency = serving(kind)
    world.assign(newer(residency, kv=KvSpec(floor=2 * FLOOR_MIB * MIB, block_tokens=16)))
    world.run()
    assert generations(world) == {1: "ready", 2: "waiting"}
    assert answered(world)
    assert "MiB asked" in next(group.reason for group in world.core.state.of_model("a") if group.state == "waiting")


def test_an_old_generation_that_is_parked_serves_while_the_new_one_cannot() -> None:
    world = World(capacity_mib=ONE_FITS_MIB).ready(wanted(idle_park_s=10))
    world.later(11)
    assert world.states("a") == ["parked"]
    world.facts["a"] = "/m: it is cut short"
    world.assign(wanted(generation=2, source="file:/other", idle_park_s=10))
    world.run()
    assert generations(world) == {1: "parked", 2: "failed"}
    assert answered(world)


def test_an_operator_parks_and_wakes_what_stands_in() -> None:
    world, _ = serving("auto")
    world.ranks[0].load_error = "corrupt"
    world.assign(newer("auto"))
    world.run()
    for residency, state in (("parked", "parked"), ("resident", "ready"), ("cold", "cold")):
        world.core.on_set_residency(world.now, 0, "a", residency)
        world.run()
        assert generations(world) == {1: state, 2: "failed"}
    world.ranks[0].load_error = ""
    assert answered(world)
    assert generations(world) == {1: "ready", 2: "failed"}


def test_idle_models_make_room_before_the_old_generation_does() -> None:
    """So it serves until the new one does."""
    world = World(capacity_mib=2 * ONE_FITS_MIB).ready(wanted(), wanted("b"))
    world.assign(newer("auto", kv=KvSpec(floor=(FLOOR_MIB + 30) * MIB, block_tokens=16)), wanted("b"))
    while generations(world).get(2) != "loading":
        assert world.turn()
    assert (generations(world)[1], world.states("b")) == ("ready", ["parked"])


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_are_lost_do_not_lose_the_old_generation(kind: str) -> None:
    """Rule 11."""
    world, residency = serving(kind)
    world.ranks[0].load_error = "corrupt"
    world.assign(newer(residency))
    while generations(world).get(2) != "failed":
        assert world.turn()
    world.ranks[0].load_error = ""
    world.run()
    world.lose_ranks()
    world.ranks_up()
    world.run()
    assert generations(world) == {1: "ready", 2: "failed"}
    assert answered(world)


# ------------------------------------------------------------------ more room for an attempt that failed


@pytest.mark.parametrize("neighbour", [None, "resident"])
def test_an_attempt_asks_for_no_more_than_it_can_have(neighbour: str | None) -> None:
    """It would wait for ever, or fail for want of memory that no load needs."""
    least = sum(size_group("a", wanted().spec, FACTS, wanted().placement, "cpu").budget[0].values()) // MIB
    beside = [wanted("b", residency="resident")] if neighbour else []
    world = World(capacity_mib=least + 1 + len(beside) * (HELD_MIB - 16 + FLOOR_MIB))
    world.assign(*beside)
    world.run()
    world.ranks[0].load_error = "disk gone"
    world.assign(wanted(), *beside)
    for _ in range(30):
        world.run()
        world.later(5)
    assert loads(world) - len(beside) == MAX_ATTEMPTS
    assert world.states("a") == ["failed"]
    assert "disk gone" in world.group("a").reason


def test_an_attempt_that_failed_gets_the_room_of_idle_models() -> None:
    world = World(capacity_mib=2 * ONE_FITS_MIB - 60).ready(wanted("b"))
    world.ranks[0].load_error = "needs more"
    world.assign(wanted(), wanted("b"))
    for _ in range(6):
        world.run()
        world.later(TURN_S)
    sizes = [sum(command.budget.values()) for _, command in world.sent if isinstance(command, LoadShard) and command.model == "a"]
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]
