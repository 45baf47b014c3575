"""Who gets a pool's time: models by weight, tenants by weight, priority raised by waiting; copies that nobody waits for last."""

from __future__ import annotations

from collections import Counter

import pytest
from pool_world import World, wanted

from gateway.api.config import LimitsSpec
from gateway.api.errors import ErrorCode
from gateway.api.proto.pool_pb2 import Submit
from workers.driver.group import Wanted
from workers.driver.step_shares import LEAD_S
from workers.driver.wire import request_of
from workers.messages import Step

TURN_S = 0.01  # that the simulated world takes for every command
ONE = LimitsSpec(concurrency=1, queue=200, batch_tokens=32)


def times(world: World, seconds: dict[str, float], turns: int) -> dict[str, float]:
    """Seconds that the steps of each model took, while all have something to do."""
    models = {group.id: group.model for group in world.core.state.groups.values()}
    began = len(world.sent)
    for _ in range(turns):
        world.turn()
    steps = Counter(models[command.group_id] for _, command in world.sent[began:] if isinstance(command, Step))
    return {model: count * (seconds[model] + TURN_S) for model, count in steps.items()}


def busy(*models: Wanted, seconds: dict[str, float]) -> World:
    world = World(capacity_mib=400).ready(*models)
    world.ranks[0].step_seconds = seconds
    for group in models:
        for _ in range(4):
            world.submit((1, 2), max_tokens=240, model=group.model)
    return world


def test_models_share_the_time_of_a_rank_however_long_their_steps_are() -> None:
    """Rule 7."""
    seconds = {"large": 0.2, "small": 0.01}
    shares = times(busy(wanted("large"), wanted("small"), seconds=seconds), seconds, 200)
    assert shares["large"] == pytest.approx(shares["small"], rel=0.2)


def test_priority_is_a_larger_share_and_never_all_of_it() -> None:
    seconds = {"first": 0.05, "second": 0.05}
    shares = times(busy(wanted("first", priority=10), wanted("second"), seconds=seconds), seconds, 300)
    assert shares["first"] == pytest.approx(2 * shares["second"], rel=0.15)


def test_steps_alike_take_turns_and_nobody_catches_up_on_what_it_did_not_ask_for() -> None:
    seconds = {"a": 0.04, "b": 0.04}
    world = World(capacity_mib=400).ready(wanted("a"), wanted("b"))
    world.ranks[0].step_seconds = seconds
    world.submit(model="a", max_tokens=200)
    times(world, seconds, 100)
    world.submit(model="b", max_tokens=200)
    shares = times(world, seconds, 60)
    assert shares["a"] == pytest.approx(shares["b"], abs=2 * LEAD_S + 0.08)


def test_models_on_other_ranks_do_not_wait_for_each_other() -> None:
    """Rule 7."""
    world = World(ranks=2, capacity_mib=400).ready(wanted("a", ranks=(0,)), wanted("b", ranks=(1,)))
    for rank in world.ranks:
        rank.step_seconds = {"a": 1.0, "b": 0.001}
    world.submit(model="a", max_tokens=50)
    world.submit(model="b", max_tokens=50)
    shares = times(world, {"a": 1, "b": 1}, 40)
    assert shares["a"] == pytest.approx(shares["b"], abs=2), "a rank was left without work"


def ended_in_order(world: World) -> list[tuple[int, int]]:
    order: list[tuple[int, int]] = []
    for _ in range(3000):
        if not world.turn():
            return order
        order += [key for key in world.ends if key not in order]
    raise AssertionError("does not come to rest")


def test_tenants_share_a_model_by_weight() -> None:
    world = World().ready(wanted(limits=ONE))
    heavy = [world.submit((1, 2), max_tokens=4, tenant="heavy", tenant_weight=300) for _ in range(12)]
    light = [world.submit((3, 4), max_tokens=4, tenant="light", tenant_weight=100) for _ in range(12)]
    first = ended_in_order(world)[:9]
    assert 6 <= sum(key in heavy for key in first) <= 7
    assert sum(key in light for key in first) >= 2


def test_a_tenant_with_many_requests_does_not_keep_another_out() -> None:
    world = World().ready(wanted(limits=ONE))
    for _ in range(50):
        world.submit((1, 2), max_tokens=4, tenant="many")
    late = world.submit((3, 4), max_tokens=4, tenant="one")
    assert ended_in_order(world).index(late) <= 2


def test_priority_goes_first_and_waiting_raises_it() -> None:
    world = World().ready(wanted(limits=ONE))
    world.submit((9,), max_tokens=60)
    old = world.submit((1, 2), max_tokens=2, priority=0)
    for _ in range(3):
        world.turn()
    urgent = world.submit((3, 4), max_tokens=2, priority=50)
    order = ended_in_order(world)
    assert order.index(urgent) < order.index(old)
    again = World().ready(wanted(limits=ONE))
    again.submit((9,), max_tokens=60)
    old = again.submit((1, 2), max_tokens=2, priority=0)
    again.turn()
    again.now += 7.0  # 70 points
    urgent = again.submit((3, 4), max_tokens=2, priority=50)
    order = ended_in_order(again)
    assert order.index(old) < order.index(urgent)


def test_cancelled_requests_cost_their_tenant_nothing() -> None:
    world = World().ready(wanted(limits=ONE))
    world.submit((9,), max_tokens=10, tenant="other")
    for _ in range(20):
        world.core.on_cancel(world.now, world.submit((1, 2), max_tokens=100, tenant="left"))
    others = [world.submit((3, 4), max_tokens=4, tenant="other") for _ in range(4)]
    back = world.submit((1, 2), max_tokens=4, tenant="left")
    order = ended_in_order(world)
    assert order.index(back) < order.index(others[1])


def test_copies_come_last_wake_nobody_and_keep_nothing_in_memory() -> None:
    """Shadow traffic counts neither for fairness nor for who leaves memory."""
    world = World().ready(wanted(limits=ONE, idle_park_s=10))
    world.submit((9,), max_tokens=5)
    copy = world.submit((1, 2), max_tokens=4, tenant="t", shadow=True)
    real = [world.submit((3, 4), max_tokens=4, tenant="t") for _ in range(3)]
    order = ended_in_order(world)
    assert order[-1] == copy
    assert set(real) < set(order)
    used_at = world.group().used_at
    world.now += 9
    endless = world.submit((1, 2), max_tokens=200, shadow=True)
    world.turn()
    assert world.group().used_at == used_at
    world.now += 2
    world.core.on_tick(world.now)
    world.run()
    assert world.states() == ["parked"]
    assert world.error(endless) is ErrorCode.UNAVAILABLE
    late = world.submit((1, 2), shadow=True)
    world.run()
    assert world.error(late) is ErrorCode.UNAVAILABLE
    assert world.states() == ["parked"], "a copy woke it"


def test_what_gateways_say_of_tenants_and_copies_arrives() -> None:
    submit = Submit(id=5, model="m", prompt_ids=[1], tenant="t", tenant_weight=300, shadow=True)
    request = request_of(1, submit, 0.0)
    assert (request.tenant, request.tenant_weight, request.shadow) == ("t", 300, True)
    assert request_of(1, Submit(id=6, model="m"), 0.0).tenant_weight == 100, "0 reads as 100"
