"""What brings a model in and how long that wish lasts, by events: operators, requests that cannot wait, load on its replicas."""

from __future__ import annotations

from collections import Counter

import pytest
from pool_world import LOAD_MIB, MIB, World, expected_text, wanted

from gateway.api.config import KvSpec, LimitsSpec
from gateway.api.errors import ErrorCode
from workers.driver.group import MAX_ATTEMPTS
from workers.driver.lifecycle import DAMAGE_FORGOTTEN_S
from workers.messages import LoadShard, StepDone

FLOOR = KvSpec(floor=64 * MIB, block_tokens=16)
ONE_FITS_MIB = LOAD_MIB - 16 + 64 + 2


def ask(world: World, model: str, residency: str) -> str:
    state = world.core.on_set_residency(world.now, 0, model, residency)
    world.run()
    return state


def kinds(world: World, since: int) -> Counter[str]:
    return Counter(kind for kind, _, _ in world.events[since:])


def test_a_wish_ends_when_a_load_has_fulfilled_it() -> None:
    world = World().ready(wanted(idle_park_s=30))
    ask(world, "m", "cold")
    ask(world, "m", "resident")
    assert (world.states(), world.group().wake_asked) == (["ready"], False)
    since = len(world.events)
    for _ in range(3):
        world.later(31)
    assert world.states() == ["parked"]
    assert kinds(world, since)["wake"] == 0, "nobody asked again"


@pytest.mark.parametrize("fault", ["park_error", "wake_error"])
def test_a_wish_ends_when_it_failed(fault: str) -> None:
    world = World().ready()
    if fault == "wake_error":
        ask(world, "m", "parked")
    setattr(world.ranks[0], fault, "no room")
    if fault == "park_error":
        world.core.on_set_residency(world.now, 0, "m", "parked")
    ask(world, "m", "resident")
    assert not world.group().wake_asked
    setattr(world.ranks[0], fault, "")
    world.later(60)
    ask(world, "m", "parked")
    assert world.states() == ["parked"]


def test_an_idle_park_that_fails_is_not_tried_at_every_tick() -> None:
    world = World().ready(wanted(idle_park_s=30))
    world.ranks[0].park_error = "no room"
    since = len(world.events)
    world.later(31)
    for _ in range(20):
        world.later(1)
    assert kinds(world, since)["park_failed"] == 1
    world.later(11)
    assert kinds(world, since)["park_failed"] == 2


def test_waking_what_waits_says_so_and_is_a_wish() -> None:
    """It may then have the room of what is worth more and idle."""
    world = World(capacity_mib=ONE_FITS_MIB).ready(wanted("a", priority=5, keep_warm_s=60, kv=FLOOR))
    world.submit(model="a")
    world.run()
    world.assign(wanted("a", priority=5, keep_warm_s=60, kv=FLOOR), wanted("b", kv=FLOOR))
    world.run()
    assert world.states("b") == ["waiting"]
    state = ask(world, "b", "resident")
    assert state.startswith("waiting (memory: ")
    assert world.group("b").wake_asked
    world.later(61)
    assert (world.states("a"), world.states("b")) == (["parked"], ["ready"])


@pytest.mark.parametrize("residency", ["cold", "parked"])
def test_a_refusal_that_names_a_time_brings_the_model_in(residency: str) -> None:
    """Rule 6: refused at once, and what it was told is true: who comes again then is served."""
    world = World(capacity_mib=ONE_FITS_MIB)
    world.assign(wanted("a", kv=FLOOR), wanted("b", kv=FLOOR))
    world.run()
    ask(world, "a", residency)
    assert world.states("a") == [residency]
    key = world.submit(model="a", timeout_s=0.001)
    assert world.error(key) == ErrorCode.UNAVAILABLE
    world.later(world.ends[key].retry_after_s)
    again = world.submit(model="a", timeout_s=1.0)
    world.run()
    assert world.texts[again] == expected_text((1, 2, 3), 4)


@pytest.mark.parametrize("residency", ["parked", "cold"])
def test_every_replica_comes_back_when_the_load_needs_it(residency: str) -> None:
    world = World(ranks=2)
    limits = LimitsSpec(concurrency=1, queue=1, batch_tokens=32)
    world.ready(wanted(ranks=(0,), limits=limits), wanted(ranks=(1,), limits=limits))
    for _ in range(2):  # operations of one model are serial
        ask(world, "m", residency)
    assert world.states() == [residency] * 2
    first = world.submit()
    world.run()
    assert sorted(world.states()) == sorted(["ready", residency]), "one request needs one"
    assert first in world.texts
    keys = [world.submit((1, seed), 40) for seed in range(3)]
    world.run()
    assert world.states() == ["ready", "ready"]
    assert [world.texts[key] for key in keys[:2]] == [expected_text((1, seed), 40) for seed in range(2)]


def test_a_wish_is_for_all_replicas_of_a_model() -> None:
    world = World(ranks=2).ready(wanted(ranks=(0,)), wanted(ranks=(1,)))
    for _ in range(2):
        ask(world, "m", "parked")
    ask(world, "m", "resident")
    assert world.states() == ["ready", "ready"]


def damage(world: World) -> None:
    """A prompt that its weights answer with no numbers."""
    world.submit()
    world.inboxes[0].clear()
    (step,) = world.steps()[-1:]
    world.now += 0.1
    world.core.on_step_done(world.now, StepDone(step.step, step.group_id, (), 0.1, "weights gave NaN", damaged=True))
    world.run()


def loads(world: World) -> int:
    return sum(isinstance(command, LoadShard) for _, command in world.sent)


def test_a_damaged_model_is_not_loaded_anew_for_every_prompt_that_damages_it() -> None:
    world = World().ready()
    for attempt in range(1, MAX_ATTEMPTS):
        damage(world)
        assert f"attempt {attempt} of {MAX_ATTEMPTS}" in world.group().reason
        world.later(10)
        assert world.states() == ["ready"]
    damage(world)
    assert "yard wake m" in world.group().reason
    world.later(1000)
    assert (world.states(), loads(world)) == (["failed"], MAX_ATTEMPTS)
    world.assign(wanted(generation=2))
    world.run()
    assert world.states() == ["ready"]


def test_waking_what_failed_for_good_tries_it_again() -> None:
    world = World()
    world.ranks[0].load_error = "disk gone"
    world.assign(wanted())
    for _ in range(MAX_ATTEMPTS + 1):
        world.run()
        world.later(20)
    assert (world.states(), loads(world), world.group().retry_at) == (["failed"], MAX_ATTEMPTS, None)
    world.ranks[0].load_error = ""
    ask(world, "m", "resident")
    assert world.states() == ["ready"]


def test_damage_is_forgotten_after_a_quiet_while() -> None:
    world = World().ready()
    for _ in range(2 * MAX_ATTEMPTS):
        damage(world)
        world.later(DAMAGE_FORGOTTEN_S + 10)
        assert world.states() == ["ready"]
