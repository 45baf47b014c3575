"""Groups whose engine schedules itself: what goes to the engine, and what comes of its tokens. No processes."""

from __future__ import annotations

import pytest
from pool_world import EOS, World, wanted

from gateway.api.errors import ErrorCode
from workers.driver.core import STALLED_S
from workers.engines.trtllm.messages import Cancel, Generate, Output


@pytest.fixture
def world() -> World:
    """One ready group, of which at most 4 requests are in the engine."""
    world = World(capacity_mib=2000)
    world.assign(wanted(engine="trtllm"))
    world.run()
    [canary] = world.engine
    assert isinstance(canary, Generate)
    tell(world, Output(canary.sequence, list(range(8)), finish="length"))
    assert world.group().state == "ready", world.events
    world.engine.clear()
    return world


def tell(world: World, *outputs: Output) -> None:
    world.core.on_engine_tokens(world.now, world.group().id, outputs)
    world.run()
    world.core.state.check()


def generated(world: World) -> list[Generate]:
    return [message for message in world.engine if isinstance(message, Generate)]


def test_the_engine_never_has_more_than_the_concurrency_and_the_rest_goes_by_priority(world: World) -> None:
    for _ in range(4):
        world.submit()
    late, urgent = world.submit(), world.submit(priority=50)
    assert len(generated(world)) == 4
    tell(world, Output(generated(world)[0].sequence, [7], finish="length"))
    tell(world, Output(generated(world)[1].sequence, [7], finish="length"))
    first, second = (world.core.state.sequences[key][1].id for key in (urgent, late))
    assert [message.sequence for message in generated(world)[4:]] == [first, second]


def test_tokens_go_out_and_a_stop_token_ends_without_being_sent(world: World) -> None:
    key = world.submit((1, 2, 3), 9)
    [request] = generated(world)
    assert (request.prompt, request.max_tokens, request.stop_token_ids) == ([1, 2, 3], 9, [EOS])
    tell(world, Output(request.sequence, [4]))
    tell(world, Output(request.sequence, [5, EOS], finish="stop"))
    assert world.texts[key] == [4, 5]
    assert (world.ends[key].finish_reason, world.ends[key].completion_tokens) == ("stop", 3)
    assert not [message for message in world.engine if isinstance(message, Cancel)], "the engine has ended it itself"


def test_a_cancelled_request_keeps_its_place_until_the_engine_lets_go(world: World) -> None:
    """Rule 5 and rule 10: it is cancelled at once, and nothing is parked from under it."""
    keys = [world.submit() for _ in range(5)]
    world.core.on_cancel(world.now, keys[0])
    first = generated(world)[0].sequence
    assert world.engine[-1] == Cancel([first])
    assert world.ends[keys[0]].finish_reason == "cancelled"
    assert len(generated(world)) == 4
    assert not world.group().quiet
    tell(world, Output(first, [], finish="cancelled"))
    assert len(generated(world)) == 5


def test_a_deadline_that_expired_in_the_queue_never_reaches_the_engine(world: World) -> None:
    """Rule 10."""
    for _ in range(4):
        world.submit()
    key = world.submit(timeout_s=1.0)
    world.now += 2.0
    tell(world, Output(generated(world)[0].sequence, [7], finish="length"))
    assert world.error(key) is ErrorCode.DEADLINE
    assert len(generated(world)) == 4


def test_an_engine_that_is_gone_ends_its_requests_and_the_group_begins_again_once_its_memory_is_free(world: World) -> None:
    """Rule 11 and rule 3."""
    key = world.submit()
    held = world.core.state.ledger.of_owner(world.group().id)
    world.core.on_engine_lost(world.now, world.group().id, "its server is gone")
    assert world.error(key) is ErrorCode.UNAVAILABLE
    assert world.group().state == "failed"
    assert world.core.state.ledger.of_owner(world.group().id) == held, "until the unload has ended"
    world.run()
    world.later(1.5)
    assert world.group().state == "checking"


def test_requests_in_flight_and_no_token_for_too_long_ends_the_engine(world: World) -> None:
    """Rule 11: health is forward progress."""
    world.submit()
    world.now += STALLED_S - 1
    world.core.on_tick(world.now)
    assert world.dropped == []
    world.now += 2
    world.core.on_tick(world.now)
    assert world.dropped == [world.group().id]


def test_ranks_that_are_lost_leave_the_engine_alone(world: World) -> None:
    key = world.submit()
    world.core.on_ranks_lost(world.now, "rank 0 is gone")
    assert key not in world.ends
    tell(world, Output(generated(world)[0].sequence, [7], finish="length"))
    assert world.ends[key].finish_reason == "length"


def test_kv_is_fixed_when_it_is_loaded(world: World) -> None:
    """Rule 4: told in bytes; it neither grows nor shrinks."""
    group = world.group()
    assert group.sizing is not None
    assert group.sizing.floor_blocks == group.sizing.ceiling_blocks == group.kv_blocks
