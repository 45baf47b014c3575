"""What ranks say of their devices: capacity, contexts and foreign use in the ledger, and what it does not explain."""

from __future__ import annotations

from pool_world import LOAD_MIB, MIB, World, wanted

from workers.driver.pool_state import DEVICE, PoolState
from workers.messages import DeviceMemory, Done

GIB = 2**30


def memory(**changes: int) -> DeviceMemory:
    base = {"capacity_bytes": 60, "total_bytes": 100, "free_bytes": 90, "context_bytes": 8, "foreign_bytes": 2, "kept_bytes": 0}
    return DeviceMemory(**{**base, **changes})


def test_a_pool_without_memory_in_its_spec_has_what_its_devices_have() -> None:
    state = PoolState("cuda", (0,), 1)
    state.enter_device(0, memory(capacity_bytes=GIB, total_bytes=2 * GIB, free_bytes=2 * GIB, context_bytes=MIB))
    assert state.capacities == (GIB,)
    assert state.ledger.held(DEVICE, "context") == {0: MIB}
    assert state.ledger.free(0) == GIB - MIB
    state.check()


def test_others_use_first_what_the_pool_may_not_have() -> None:
    assert memory(foreign_bytes=40).intruding_bytes == 0
    assert memory(foreign_bytes=45).intruding_bytes == 5
    assert memory(capacity_bytes=100, foreign_bytes=45).intruding_bytes == 45
    state = PoolState("cuda", (0,), 1)
    state.enter_device(0, memory(foreign_bytes=45))
    assert state.ledger.held(DEVICE, "foreign") == {0: 5}


def test_what_the_device_says_above_the_ledger_is_reported() -> None:
    state = PoolState("cuda", (0,), 1)
    state.enter_device(0, memory(free_bytes=90))
    assert state.unaccounted_bytes(0) == 0
    state.ledger.record(7, 0, {"weights": 20, "communication": 3})
    state.enter_device(0, memory(free_bytes=60, kept_bytes=5))
    assert state.unaccounted_bytes(0) == 40 - 10 - 5 - 23


def test_what_groups_do_not_explain_is_promised_to_nobody_and_kv_makes_room_for_it() -> None:
    """Rule 3: what libraries took for steps is counted, and what was promised above it comes back without touching the floor."""
    world = World(capacity_mib=0, up=False)
    context = 8 * MIB
    device = {
        "capacity_bytes": LOAD_MIB * MIB + 3 * context,
        "total_bytes": 4 * GIB,
        "context_bytes": context,
        "foreign_bytes": 0,
    }
    world.core.on_ranks_up(world.now, {0: ()}, {0: memory(**device, free_bytes=4 * GIB - context)})
    world.core.on_assign(world.now, 1, 1, [wanted("a")])
    world.run()
    state = world.core.state
    [group] = state.groups.values()
    keys = [world.submit(prompt=tuple(range(1, 40)), max_tokens=150, model="a") for _ in range(3)]
    assert group.sizing is not None
    while group.kv_blocks == group.sizing.floor_blocks:
        assert world.turn()
    free = state.ledger.free(0)
    groups = state.ledger.used(0) - context
    taken = free + 3 * MIB
    lost = memory(**device, free_bytes=4 * GIB - context - groups - taken)
    world.core.on_op_done(world.now, 0, Done(op=10**6, memory=lost))
    assert state.ledger.held(DEVICE, "workspace") == {0: taken}
    assert state.ledger.free(0) == -3 * MIB
    world.later(1)
    world.run()
    assert state.ledger.free(0) >= 0
    assert group.kv_blocks >= group.sizing.floor_blocks
    assert [len(world.texts[key]) for key in keys] == [150] * 3
    state.check()


def test_groups_load_into_what_contexts_leave() -> None:
    """Rule 3: a context counts as much as a model."""
    for context_bytes, state in ((0, "ready"), (MIB, "waiting")):
        world = World(capacity_mib=0, up=False)
        device = memory(
            capacity_bytes=LOAD_MIB * MIB, total_bytes=4 * GIB, context_bytes=context_bytes, free_bytes=4 * GIB - context_bytes
        )
        world.core.on_ranks_up(world.now, {0: ()}, {0: device})
        world.core.on_assign(world.now, 1, 1, [wanted("a")])
        world.run()
        assert [group.state for group in world.core.state.groups.values()] == [state], context_bytes
        world.core.state.check()


def test_a_rank_that_began_anew_beside_an_engine_does_not_count_its_memory_twice() -> None:
    """Rule 3."""
    world = World(capacity_mib=0, up=False)
    device = {"capacity_bytes": 4 * GIB, "total_bytes": 4 * GIB, "context_bytes": MIB, "foreign_bytes": 0}
    world.core.on_ranks_up(world.now, {0: ()}, {0: memory(**device, free_bytes=4 * GIB - MIB)})
    world.core.on_assign(world.now, 1, 1, [wanted("a", engine="trtllm")])
    world.run()
    state = world.core.state
    [group] = state.groups.values()
    assert 0 in group.held
    engine = sum(size for owner, _, size in state.ledger.lines(0) if owner == group.id)
    others = 5 * MIB
    world.core.on_ranks_lost(world.now, "killed")
    anew = {**device, "foreign_bytes": engine + others, "free_bytes": 4 * GIB - MIB - engine - others}
    world.core.on_ranks_up(world.now, {0: ()}, {0: memory(**anew)})
    assert state.ledger.held(DEVICE, "foreign") == {0: others}
    assert state.unaccounted_bytes(0) == 0
    state.enter_device(0, memory(**anew))  # as the rank says it again with each of its operations
    assert state.ledger.held(DEVICE, "foreign") == {0: others}
