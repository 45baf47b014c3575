"""Sequences whose answers follow a schema come into a step when their ranks have compiled it, and nobody waits for them."""

from __future__ import annotations

import pytest
from pool_world import MIB, World, expected_text, wanted

from gateway.api.config import KvSpec, LimitsSpec
from gateway.api.errors import ErrorCode
from workers.driver.batching import Batcher
from workers.driver.constraining import COMPILE_S
from workers.driver.sequence import Request, Sequence
from workers.memory.blocks import BlockPool
from workers.messages import Constrain, SampledToken, Sampling, StepDone

SCHEMA = '{"type": "object"}'


def asked(world: World) -> list[tuple[int, str]]:
    return [(rank, command.json_schema) for rank, command in world.sent if isinstance(command, Constrain)]


def test_others_go_on_while_a_schema_is_compiled() -> None:
    """Rule 7: within a model too."""
    world = World().ready()
    world.ranks[0].compiles = False
    held = world.submit((1, 2), json_schema=SCHEMA)
    free = world.submit((1, 2, 3), max_tokens=5)
    world.run()
    assert world.texts[free] == expected_text((1, 2, 3), 5)
    assert held not in world.texts
    assert asked(world) == [(0, SCHEMA)]


def test_only_ranks_that_sample_are_asked_and_all_of_them_are_waited_for() -> None:
    world = World(ranks=4).ready(wanted(ranks=(0, 1, 2, 3), stages=2))
    world.ranks[3].compiles = False
    key = world.submit((1, 2, 3), max_tokens=2, json_schema=SCHEMA)
    steps = len(world.steps())
    world.run()
    assert asked(world) == [(2, SCHEMA), (3, SCHEMA)]
    assert len(world.steps()) == steps
    sequence = next(iter(world.ranks[2].compiled))
    world.core.on_constrained(world.now, 3, world.ranks[2].execute(Constrain(world.group().id, sequence, SCHEMA)))  # type: ignore[arg-type]
    world.ranks[3].compiled.add(sequence)
    world.run()
    assert world.texts[key] == expected_text((1, 2, 3), 2)


def test_the_schema_travels_once_and_its_memory_is_in_the_ledger() -> None:
    world = World().ready()
    before = world.core.state.ledger.used(0)
    world.submit(max_tokens=3, json_schema=SCHEMA)
    world.run()
    introduced = [part.new for step in world.steps() for part in step.sequences if part.new and part.new.constrained]
    assert [new.sampling.json_schema for new in introduced] == [""]
    assert world.core.state.ledger.used(0) == before + 3 * MIB
    world.assign()
    world.run()
    assert world.core.state.ledger.used(0) == 0


def test_a_schema_that_a_rank_refuses_ends_its_request_alone() -> None:
    world = World().ready()
    world.ranks[0].schema_error = "too many states"
    bad, good = world.submit(json_schema=SCHEMA), world.submit()
    world.run()
    end = world.ends[bad]
    assert (end.error_code, end.error_field) == (ErrorCode.INVALID, "json_schema")
    assert "too many states" in end.error_message
    assert world.ends[good].finish_reason == "length"


def test_a_schema_that_takes_too_long_ends_its_request_and_is_forgotten() -> None:
    world = World().ready()
    world.ranks[0].compiles = False
    key = world.submit(json_schema=SCHEMA)
    world.later(COMPILE_S - 1)
    assert key not in world.ends
    world.later(2)
    assert (world.ends[key].error_code, world.ends[key].error_field) == (ErrorCode.INVALID, "json_schema")
    assert asked(world) == [(0, SCHEMA), (0, "")]


def test_a_request_that_leaves_meanwhile_is_forgotten_by_the_ranks() -> None:
    """Rule 10."""
    world = World().ready()
    world.core.on_cancel(world.now, world.submit(json_schema=SCHEMA))
    world.run()
    assert asked(world) == [(0, SCHEMA), (0, "")]
    assert not world.ranks[0].compiled
    world.submit(json_schema=SCHEMA)
    world.lose_ranks()
    world.ranks_up()
    world.run()
    assert asked(world)[2:] == [(0, SCHEMA)]


def test_after_a_preemption_it_is_compiled_anew() -> None:
    world = World().ready(
        wanted(kv=KvSpec(floor=16 * MIB, ceiling=16 * MIB, block_tokens=16), limits=LimitsSpec(concurrency=4, batch_tokens=32))
    )
    keys = [world.submit((seed, 2, 3), max_tokens=120, json_schema=SCHEMA) for seed in (1, 4, 5)]
    world.run()
    assert world.group().batcher.preemptions > 0  # pyright: ignore[reportOptionalMemberAccess]
    assert [world.texts[key] for key in keys] == [expected_text((seed, 2, 3), 120) for seed in (1, 4, 5)]
    assert len(asked(world)) == 3 + world.group().batcher.preemptions  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(("json_schema", "planned"), [("", True), (SCHEMA, False)])
def test_no_step_is_planned_ahead_of_a_token_that_decides_what_may_follow(json_schema: str, planned: bool) -> None:
    batcher = Batcher(BlockPool(8), 16, 32, 4, stages=1, ahead=1)
    request = Request((1, 1), "m", (1, 2, 3), 8, Sampling(json_schema=json_schema))
    sequence = Sequence(id=1, request=request, arrival=1, tokens=[1, 2, 3], max_length=11, stop_ids=frozenset())
    batcher.add(sequence)
    sequence.prepared = True
    first = batcher.plan()
    assert first is not None
    assert (batcher.plan() is not None) == planned
    batcher.finish(first, StepDone(1, 1, (SampledToken(1, 7),), 0.0))
    following = batcher.plan()
    assert following is not None
    assert following.sequences[0].tokens == (() if planned else (7,))
