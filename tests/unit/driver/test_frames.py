"""What a gateway is told of a pool's progress."""

from __future__ import annotations

import asyncio

from pool_world import World

from workers.driver.frames import Outbox
from workers.driver.observe import loads


async def test_rule_11_a_gateway_sees_a_long_prompt_go_on() -> None:
    """rule 11: a prompt of many chunks gives no token for long; each tick says how many steps were done."""
    world = World().ready()
    outbox = Outbox("g")
    outbox.flush(world.core.state.steps_done, loads(world.core.state), alone=True)
    before = await outbox.next_frame()
    assert before is not None
    key = world.submit(tuple(range(40)) * 4, max_tokens=1)  # five chunks of 32
    world.turn()
    world.turn()
    assert key not in world.ends
    outbox.flush(world.core.state.steps_done, loads(world.core.state), alone=True)
    frame = await outbox.next_frame()
    assert frame is not None
    assert frame.step == before.step + 2
    assert not frame.tokens


async def test_nothing_is_said_when_nothing_is_new() -> None:
    world = World().ready()
    outbox = Outbox("g")
    for _ in range(2):
        outbox.flush(7, loads(world.core.state), alone=True)
    assert await outbox.next_frame() is not None
    outbox.flush(7, loads(world.core.state), alone=True)
    taking = asyncio.ensure_future(outbox.next_frame())
    await asyncio.sleep(0)
    assert not taking.done()
    outbox.flush(8, loads(world.core.state), alone=True)
    assert (await taking) is not None


async def test_a_driver_with_nothing_new_says_that_it_is_there() -> None:
    world = World().ready()
    outbox = Outbox("g")
    for _ in range(2):
        outbox.flush(7, loads(world.core.state), alive=True)
        frame = await outbox.next_frame()
        assert frame is not None
        assert frame.step == 7
