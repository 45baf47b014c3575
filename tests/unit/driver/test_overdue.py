"""Operations that a rank never answers, in pools where nobody asks for anything meanwhile."""

from __future__ import annotations

import pytest
from pool_world import SimulatedRank, World, wanted

from workers.driver import overdue
from workers.driver.group import MAX_ATTEMPTS
from workers.messages import Command, LoadShard, ParkShard, Progress, Step, UnloadShard, WakeShard


def pass_time(world: World, seconds: float) -> None:
    """With the driver's ticks, while the ranks do nothing."""
    for _ in range(round(seconds * 2)):
        world.now += 0.5
        world.core.on_tick(world.now)


def new_ranks(world: World) -> None:
    world.ranks = [SimulatedRank(rank) for rank in range(len(world.ranks))]
    world.ranks_up()


def until_sent(world: World, kind: type[Command]) -> None:
    while not any(isinstance(command, kind) for inbox in world.inboxes for command in inbox):
        assert world.turn()


@pytest.mark.parametrize(
    ("asked", "kind"), [(("parked",), ParkShard), (("parked", "resident"), WakeShard), (("parked", "cold"), UnloadShard)]
)
def test_rule_11_a_park_wake_or_unload_that_no_rank_answers_restarts_the_ranks(asked: tuple[str, ...], kind: type) -> None:
    """Rule 11: health is forward progress, also of a pool without requests."""
    world = World(ranks=2).ready(wanted(ranks=(0, 1), stages=2))
    for residency in asked:
        world.run()
        world.core.on_set_residency(world.now, 0, "m", residency)
    until_sent(world, kind)
    name = {ParkShard: "park", WakeShard: "wake", UnloadShard: "unload"}[kind]
    world.inboxes[1].clear()  # rank 1 is stopped
    world.run()
    pass_time(world, overdue.FLOOR_S - 2)
    assert world.restarts == []
    pass_time(world, 4)
    [reason] = world.restarts
    assert reason.startswith(f"rank 1 does not answer: the {name} of `m` (group ")
    assert reason.endswith("were expected")
    assert any(event[0] == f"{name}_failed" and reason in event[2] for event in world.events)
    new_ranks(world)
    world.run()
    world.submit()
    world.run()
    assert world.states() == ["ready"]


def test_a_load_that_goes_on_is_waited_for_and_one_that_is_silent_is_not() -> None:
    world = World()
    world.assign(wanted())
    until_sent(world, LoadShard)
    op = world.group().op
    assert op is not None
    limit_s = overdue.LOAD_FLOOR_S["cpu"]
    for tenth in range(10):
        pass_time(world, limit_s - 10)
        world.core.on_progress(world.now, 0, Progress(op.id, tenth / 10, "converting"))
    assert world.restarts == []
    pass_time(world, limit_s + 1)
    assert "the load of `m`" in world.restarts[0]
    assert (world.states(), world.group().attempts) == (["waiting"], 1)


def test_a_load_that_hangs_each_time_is_given_up_and_the_others_serve() -> None:
    """Each of its attempts costs all models their ranks."""
    world = World(ranks=2)
    world.assign(wanted("a", (0,)), wanted("m", (1,)))
    for attempt in range(1, MAX_ATTEMPTS + 1):
        while True:
            world.inboxes[1].clear()  # rank 1 is stopped
            if not world.turn():
                break
        assert world.states("a") == ["ready"]
        pass_time(world, overdue.LOAD_FLOOR_S["cpu"] + 2)
        assert len(world.restarts) == attempt
        new_ranks(world)
    world.run()
    assert (world.states("a"), world.states("m")) == (["ready"], ["failed"])
    assert "the load of `m`" in world.group("m").reason
    assert "attempt 5 of 5; `yard wake m`" in world.group("m").reason
    world.core.on_set_residency(world.now, 0, "m", "resident")
    world.later(1)
    assert world.states("m") == ["ready"]


def test_the_time_in_which_the_driver_itself_stood_still_does_not_count() -> None:
    """What ranks answered meanwhile waits to be read."""
    world = World().ready()
    world.core.on_set_residency(world.now, 0, "m", "parked")
    pass_time(world, 1)
    world.now += 10 * overdue.BUSY_FLOOR_S
    world.core.on_tick(world.now)
    assert world.restarts == []
    pass_time(world, overdue.FLOOR_S + 1)
    assert len(world.restarts) == 1


def test_what_comes_in_order_with_steps_waits_as_long_as_these_may_take() -> None:
    world = World(capacity_mib=400).ready(wanted("m"), wanted("n"))
    world.submit(model="n")
    world.core.on_set_residency(world.now, 0, "m", "parked")
    assert [type(command) for command in world.inboxes[0]] == [Step, ParkShard]
    pass_time(world, overdue.FLOOR_S + 2)
    assert world.restarts == []
    world.run()
    assert (world.states("m"), world.states("n")) == (["parked"], ["ready"])
