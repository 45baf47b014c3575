"""Parks and wakes, by events: nobody's memory is pulled away, nobody wakes a model twice, nobody waits for nothing."""

from __future__ import annotations

import pool_world
import pytest
from pool_world import FACTS, HELD_MIB, LOAD_MIB, MIB, World, expected_text

from gateway.api.config import KvSpec, LimitsSpec, ModelSpec, PoolSpec
from gateway.api.errors import ErrorCode, YardError
from placement.parking import TURN_S, Candidate, choose
from workers.driver.group import Wanted
from workers.driver.host_memory import standby_capacities
from workers.driver.observe import group_records, switch_records
from workers.driver.requests import LONGEST_HOLD_S
from workers.driver.residency import TRANSITIONS, Situation, allowed, decide
from workers.driver.switching import PARK_AGAIN_AFTER_S
from workers.messages import LoadShard, ParkShard, UnloadShard, WakeShard, Welcome

FLOOR_MIB = 64
TAKES_MIB = HELD_MIB - 16 + FLOOR_MIB
ONE_FITS_MIB = LOAD_MIB - 16 + FLOOR_MIB + 2  # also while it loads
assert ONE_FITS_MIB < 2 * TAKES_MIB


def wanted(model: str = "m", ranks: tuple[int, ...] = (0,), **changes: object) -> Wanted:
    """Much KV, so that two of them are more than one of them with the room that a load asks for."""
    return pool_world.wanted(model, ranks, **{"kv": KvSpec(floor=FLOOR_MIB * MIB, block_tokens=16), **changes})  # type: ignore[arg-type]


def count(world: World, kind: type) -> int:
    return sum(isinstance(command, kind) for _, command in world.sent)


def both(*, capacity_mib: int = ONE_FITS_MIB, **changes: object) -> World:
    """`a` is parked, `b` is in memory."""
    world = World(capacity_mib=capacity_mib)
    world.assign(wanted("a", **changes), wanted("b", **changes))  # type: ignore[arg-type]
    world.run()
    assert (world.states("a"), world.states("b")) == (["parked"], ["ready"]), world.events
    return world


def park(world: World, model: str = "m", residency: str = "parked") -> str:
    return world.core.on_set_residency(world.now, 0, model, residency)


# ------------------------------------------------------------------ the table


def test_every_state_can_be_reached_and_left() -> None:
    reached = {"waiting"}
    for _ in TRANSITIONS:
        reached |= {transition.target for transition in TRANSITIONS if transition.source in reached}
    sources, targets = {t.source for t in TRANSITIONS}, {t.target for t in TRANSITIONS}
    assert reached >= sources | targets
    assert targets - sources == set(), "a state without a way out"


def test_the_table_decides_by_its_guards() -> None:
    assert decide("ready", "park", Situation(pinned=True)) == "its spec says residency: resident"
    assert "under way" in str(decide("parked", "wake", Situation(operating=True)))
    assert "nobody" in str(decide("parked", "wake", Situation(asked=False)))
    assert "on its way" in str(decide("parked", "wake", Situation(bringing=True)))
    assert getattr(decide("parked", "wake", Situation()), "target", None) == "waking"
    assert "cannot wake" in str(decide("ready", "wake", Situation()))
    assert allowed("ready", "parking")
    assert not allowed("ready", "parked"), "what serves is never parked without a moment to become quiet"


# ------------------------------------------------------------------ eviction


def candidate(number: int, *, mib: int = 10, idle_s: float = 10, priority: int = 0, wake_s: float = 1) -> Candidate:
    return Candidate(number, {0: mib * MIB}, idle_s, priority, wake_s)


@pytest.mark.parametrize(
    ("stays", "goes"),
    [
        (candidate(1, idle_s=1), candidate(2, idle_s=100)),
        (candidate(1, priority=20), candidate(2)),
        (candidate(1, wake_s=5), candidate(2)),
        (candidate(1, mib=10), candidate(2, mib=20)),
    ],
    ids=["recency", "priority", "cost of its wake", "bytes"],
)
def test_the_least_value_per_byte_leaves(stays: Candidate, goes: Candidate) -> None:
    assert choose([stays, goes], {0: 5 * MIB}) == (goes.group_id,)


def test_no_more_leave_than_are_needed_and_none_when_all_would_not_do() -> None:
    small, large = candidate(1, mib=4, idle_s=900), candidate(2, mib=40)
    assert choose([small, large], {0: 30 * MIB}) == (2,), "the small one would not help"
    assert choose([small, large], {0: 44 * MIB}) == (1, 2)
    assert choose([small, large], {0: 45 * MIB}) is None
    assert choose([small], {0: 1, 1: 1}) is None, "rank 1 has nothing of it"
    assert choose([small], {0: -5}) == ()


# ------------------------------------------------------------------ room


def test_a_pool_owns_more_than_its_memory_holds() -> None:
    world = both()
    assert world.core.state.ledger.of_owner(world.group("a").id) == {}
    assert world.core.state.ledger.used(0) == TAKES_MIB * MIB
    assert [(record.model, record.state, record.residency) for record in group_records(world.core.state, world.now, 0)] == [
        ("a", "parked", "parked"),
        ("b", "ready", ""),
    ]
    assert group_records(world.core.state, world.now, 0)[0].standby_bytes == 9 * MIB
    assert (count(world, LoadShard), count(world, WakeShard)) == (2, 0)


def test_many_requests_for_a_parked_model_wake_it_once_and_are_held_meanwhile() -> None:
    """Rule 6."""
    world = both(limits=LimitsSpec(concurrency=4, queue=60, batch_tokens=32))
    keys = [world.submit((1, seed % 40), model="a") for seed in range(60)]
    assert "parked" in world.holds[keys[0]][0]
    assert all(world.holds[key][1] > 0 for key in keys)
    world.run()
    assert [world.texts[key] for key in keys] == [expected_text((1, seed % 40), 4) for seed in range(60)]
    assert (count(world, WakeShard), count(world, LoadShard)) == (1, 2)
    assert (world.states("a"), world.states("b")) == (["ready"], ["parked"])
    assert {record.path: record.count for record in switch_records(world.core.state)} == {"load": 2, "park": 2, "wake": 1}


def test_held_requests_for_a_parked_model_are_bounded() -> None:
    """Rule 6."""
    world = both(limits=LimitsSpec(concurrency=1, queue=3, batch_tokens=32))
    keys = [world.submit(model="a") for _ in range(4)]
    assert world.error(keys[3]) == ErrorCode.EXHAUSTED
    world.core.on_cancel(world.now, keys[0])
    world.run()
    assert world.ends[keys[0]].finish_reason == "cancelled"
    assert len(world.texts) == 2


def test_a_deadline_shorter_than_the_wake_is_refused_at_once() -> None:
    """Rule 6."""
    world = both()
    key = world.submit(model="a", timeout_s=0.001)
    assert world.error(key) == ErrorCode.UNAVAILABLE
    assert "deadline" in world.ends[key].error_message
    world.run()
    in_time = world.submit(model="a", timeout_s=30)
    world.run()
    assert world.texts[in_time]


def test_the_estimate_follows_the_last_wake_that_was_measured() -> None:
    """Rule 6: an estimated wait."""
    world = both()
    world.submit(model="a")
    world.turn()
    world.now += 3.0  # it takes long
    world.run()
    key = world.submit(model="b")
    assert world.holds[key][1] > 2.0
    world.run()


def test_a_model_with_requests_in_flight_is_not_parked_to_make_room() -> None:
    """Rule 5."""
    world = both()
    running = world.submit((7, 7), model="b", max_tokens=30)
    world.turn()
    waiting = world.submit(model="a")
    parks = count(world, ParkShard)
    for _ in range(10):
        world.turn()
    assert (world.states("b"), count(world, ParkShard)) == (["ready"], parks)
    world.run()
    world.later(0.1)
    assert world.texts[running] == expected_text((7, 7), 30)
    assert world.texts[waiting] == expected_text((1, 2, 3), 4)
    assert not [command for _, command in world.sent if isinstance(command, UnloadShard)]


def test_two_busy_models_take_turns() -> None:
    """Nobody waits for ever: after a while the busy one takes nothing new, ends what it has, and parks (rule 5)."""
    world = both(limits=LimitsSpec(concurrency=4, queue=99, batch_tokens=32))
    long = world.submit((7, 7), model="b", max_tokens=200)
    world.turn()
    waiting = world.submit(model="a")
    world.turn()
    world.now += TURN_S + 1
    world.core.on_tick(world.now)
    assert world.states("b") == ["parking"]
    late = world.submit((8,), model="b")
    assert late in world.holds
    world.run()
    world.later(0.1)
    assert world.texts[long] == expected_text((7, 7), 200)
    assert world.texts[waiting] == expected_text((1, 2, 3), 4)
    world.later(TURN_S)
    assert world.texts[late] == expected_text((8,), 4)


def test_pinned_models_stay() -> None:
    world = World(capacity_mib=ONE_FITS_MIB).ready(wanted("a", residency="resident"))
    world.assign(wanted("a", residency="resident"), wanted("b"))
    world.run()
    world.later(1000)
    assert (world.states("a"), world.states("b")) == (["ready"], ["waiting"])
    assert "MiB asked" in world.group("b").reason
    with pytest.raises(YardError, match="residency: resident") as refused:
        park(world, "a")
    assert refused.value.code == ErrorCode.CONFLICT


def test_what_its_engine_cannot_park_stays() -> None:
    world = World(capacity_mib=ONE_FITS_MIB)
    world.ranks[0].parkable = False
    world.ready(wanted("a"))
    world.assign(wanted("a"), wanted("b"))
    world.run()
    assert (world.states("a"), world.states("b")) == (["ready"], ["waiting"])
    with pytest.raises(YardError, match="cannot park"):
        park(world, "a")


def test_a_warm_model_stays_except_for_higher_priority() -> None:
    world = World(capacity_mib=ONE_FITS_MIB).ready(wanted("a", keep_warm_s=60))
    world.submit(model="a")
    world.run()
    world.assign(wanted("a", keep_warm_s=60), wanted("b"))
    world.run()
    assert world.states("b") == ["waiting"]
    world.later(61)
    assert (world.states("a"), world.states("b")) == (["parked"], ["ready"])
    again = World(capacity_mib=ONE_FITS_MIB).ready(wanted("a", keep_warm_s=60))
    again.assign(wanted("a", keep_warm_s=60), wanted("b", priority=1))
    again.run()
    assert again.states("b") == ["ready"]


def test_without_host_memory_for_its_copy_a_model_goes_cold() -> None:
    """Rule 3: standby copies are counted, too."""
    world = World(capacity_mib=ONE_FITS_MIB)
    world.core.on_host_memory(0, {0: 9 * MIB})
    world.assign(wanted("a"), wanted("b"), wanted("c"))
    world.run()
    assert sorted(state for model in "abc" for state in world.states(model)) == ["cold", "parked", "ready"]
    assert any(kind == "park_refused" and "no host memory for 9 MiB" in text for kind, _, text in world.events)
    keys = [world.submit(model=model, max_tokens=2) for model in "abc"]
    for _ in range(4):
        world.run()
        world.later(TURN_S)
    assert [world.texts[key] for key in keys] == [expected_text((1, 2, 3), 2)] * 3
    assert world.core.state.standby_bytes(0) <= 9 * MIB


def test_a_model_in_memory_gives_up_its_copy_where_another_has_to_park() -> None:
    """Rule 3: host memory for two copies is enough for three models of which two are in memory."""
    world = World(capacity_mib=ONE_FITS_MIB + TAKES_MIB)
    world.ranks[0].keeps_copies = True
    world.core.on_host_memory(0, {0: 2 * 9 * MIB})
    world.assign(wanted("a"), wanted("b"), wanted("c"))
    world.run()
    for model in "abcabc":
        key = world.submit(model=model, max_tokens=2)
        for _ in range(3):
            world.run()
            world.later(TURN_S)
        assert world.texts[key] == expected_text((1, 2, 3), 2)
        assert len(world.ranks[0].copies) * 9 * MIB == world.core.state.standby_bytes(0) <= 2 * 9 * MIB
    assert count(world, LoadShard) == 3, "nobody had to be loaded again"
    assert any(isinstance(command, ParkShard) and command.drop_copies for _, command in world.sent)


def many(model: str = "a") -> Wanted:
    """Its requests want far more KV than it keeps."""
    return wanted(model, kv=KvSpec(floor=16 * MIB, block_tokens=16), limits=LimitsSpec(concurrency=16, queue=64, batch_tokens=64))


def busy_beside_an_idle_one(**idle: object) -> tuple[World, list[tuple[int, int]]]:
    """`a` runs requests that want more KV than `b`, idle for a while, leaves free."""
    world = World(capacity_mib=ONE_FITS_MIB + TAKES_MIB)
    world.ready(many("a"), wanted("b", **idle))  # type: ignore[arg-type]
    world.later(TURN_S + 1)
    keys = [world.submit((number, *range(1, 49)), 190, model="a") for number in range(12)]
    return world, keys


def test_an_idle_model_leaves_its_memory_to_the_kv_of_requests_that_run() -> None:
    world, keys = busy_beside_an_idle_one()
    while world.turn():
        if world.states("b") == ["parked"]:
            break
    assert world.states("b") == ["parked"], "and nobody had to wait for the requests to end"
    assert any("KV of `a`" in text for kind, model, text in world.events if (kind, model) == ("parking", "b"))
    key = world.submit(model="b", max_tokens=2)
    world.run()
    world.later(1)
    assert [len(world.texts[each]) for each in keys] == [190] * 12
    assert world.texts[key] == expected_text((1, 2, 3), 2)


@pytest.mark.parametrize("kept", [{"residency": "resident"}, {"keep_warm_s": 600}, {"priority": 5}])
def test_what_is_kept_stays_beside_one_that_wants_kv(kept: dict[str, object]) -> None:
    world, keys = busy_beside_an_idle_one(**kept)
    world.run()
    world.later(1)
    assert world.states("b") == ["ready"]
    assert [len(world.texts[each]) for each in keys] == [190] * 12


def test_a_wake_parks_who_is_idle_before_it_takes_kv_from_requests_that_run() -> None:
    world = World(capacity_mib=ONE_FITS_MIB + TAKES_MIB + HELD_MIB)
    world.ready(many("a"), wanted("b"), wanted("c"))
    park(world, "c")
    world.run()
    world.later(TURN_S + 1)
    keys = [world.submit((number, *range(1, 49)), 100, model="a") for number in range(12)]
    while world.group("a").kv_blocks < 112:
        assert world.turn()
    world.submit(model="c", max_tokens=2)
    while world.states("c") != ["ready"]:
        assert world.turn()
    assert world.states("b") == ["parked"]
    assert world.group("a").kv_blocks >= 112
    world.run()
    assert [len(world.texts[key]) for key in keys] == [100] * 12


def test_ranks_of_a_node_share_what_it_has_left() -> None:
    welcomes = {rank: Welcome(rank, 1, "cpu", node, (), host_bytes=10 * MIB) for rank, node in enumerate(("n", "n", "o"))}
    cpu = PoolSpec(devices=3, memory=2 * MIB)
    assert standby_capacities(cpu, [2 * MIB] * 3, welcomes) == {0: 3 * MIB // 2, 1: 3 * MIB // 2, 2: 4 * MIB}
    assert standby_capacities(cpu, [20 * MIB] * 3, welcomes) == {0: 0, 1: 0, 2: 0}
    configured = PoolSpec(devices=3, memory=2 * MIB, standby=3 * MIB)
    assert standby_capacities(configured, [2 * MIB] * 3, welcomes) == {0: 3 * MIB, 1: 3 * MIB, 2: 4 * MIB}
    cuda = PoolSpec(device="cuda", devices=3)
    assert standby_capacities(cuda, [80 * MIB] * 3, welcomes) == {0: 5 * MIB // 2, 1: 5 * MIB // 2, 2: 5 * MIB}, (
        "cards have their own"
    )


def test_a_model_of_lower_priority_stands_back_until_it_is_asked_for() -> None:
    """It is no failure: a site with it is up, and its first request brings it in."""
    world = World(capacity_mib=ONE_FITS_MIB).ready(wanted("a", priority=10))
    world.assign(wanted("a", priority=10), wanted("b"))
    world.run()
    assert (world.states("a"), world.states("b")) == (["ready"], ["cold"])
    assert "when it is asked for" in world.group("b").reason
    assert [record.state for record in group_records(world.core.state, world.now, 0)] == ["ready", "parked"]
    key = world.submit(model="b", max_tokens=2)
    world.run()
    assert world.texts[key] == expected_text((1, 2, 3), 2)
    assert (world.states("a"), world.states("b")) == (["parked"], ["ready"])


def test_nobody_is_held_for_ever() -> None:
    """Rule 6: bounded, also in time."""
    world = World(capacity_mib=ONE_FITS_MIB).ready(wanted("a", residency="resident"))
    world.assign(wanted("a", residency="resident"), wanted("b"))
    world.run()
    key = world.submit(model="b")
    world.later(LONGEST_HOLD_S - 1)
    assert key not in world.ends
    world.later(2)
    assert world.error(key) == ErrorCode.UNAVAILABLE
    assert "did not come in" in world.ends[key].error_message


# ------------------------------------------------------------------ idle, and by hand


def test_an_idle_model_parks_then_lets_go_and_comes_back_from_zero() -> None:
    world = World().ready(wanted(idle_park_s=10, idle_unload_s=100))
    world.submit()
    world.run()
    world.later(11)
    assert world.states() == ["parked"]
    assert world.core.state.ledger.used(0) == 0
    world.later(100)
    assert world.states() == ["cold"]
    assert world.ranks[0].shards == {}
    keys = [world.submit((1, seed)) for seed in range(5)]
    assert all(key in world.holds for key in keys)
    world.run()
    assert [world.texts[key] for key in keys] == [expected_text((1, seed), 4) for seed in range(5)]
    assert count(world, LoadShard) == 2


def test_parking_by_hand_waits_for_what_is_in_flight() -> None:
    """Rule 5."""
    world = World().ready()
    key = world.submit((1, 2), max_tokens=20)
    world.turn()
    assert park(world) == "parking"
    assert count(world, ParkShard) == 0
    late = world.submit((3, 4))
    world.run()
    assert world.texts[key] == expected_text((1, 2), 20)
    assert world.texts[late] == expected_text((3, 4), 4)
    assert (count(world, ParkShard), count(world, WakeShard)) == (1, 1)


def test_resident_parked_and_cold_by_hand() -> None:
    world = World().ready()
    park(world)
    world.run()
    assert world.states() == ["parked"]
    park(world, residency="resident")
    world.run()
    assert world.states() == ["ready"]
    park(world, residency="cold")
    world.run()
    assert (world.states(), world.ranks[0].shards) == (["cold"], {})
    park(world, residency="resident")
    world.run()
    assert world.states() == ["ready"]
    for model, residency, code in (("other", "parked", ErrorCode.NOT_FOUND), ("m", "warm", ErrorCode.INVALID)):
        with pytest.raises(YardError) as refused:
            park(world, model, residency)
        assert refused.value.code == code


def test_an_older_fence_is_refused() -> None:
    world = World()
    world.assign(wanted(), fence=5)
    world.run()
    with pytest.raises(YardError, match="fence 4"):
        world.core.on_set_residency(world.now, 4, "m", "parked")


# ------------------------------------------------------------------ what goes wrong


def test_a_park_that_fails_on_one_rank_brings_all_back_and_is_not_tried_at_once() -> None:
    """Rule 3: all ranks or none."""
    world = World(ranks=2).ready(wanted(ranks=(0, 1), stages=2))
    used = [world.core.state.ledger.used(rank) for rank in (0, 1)]
    world.ranks[1].park_error = "no host memory"
    park(world)
    world.run()
    assert world.states() == ["ready"]
    assert [rank.parked for rank in world.ranks] == [set(), set()]
    assert [world.core.state.ledger.used(rank) for rank in (0, 1)] == used
    key = world.submit()
    world.run()
    assert world.texts[key] == expected_text((1, 2, 3), 4)
    assert any(kind == "park_failed" and "no host memory" in text for kind, _, text in world.events)
    assert world.group().park_retry_at == pytest.approx(world.now + PARK_AGAIN_AFTER_S, abs=5)


def test_a_wake_that_fails_gives_everything_back_and_loads_anew() -> None:
    """Rule 3."""
    world = World(ranks=2).ready(wanted(ranks=(0, 1), stages=2))
    park(world)
    world.run()
    world.ranks[1].wake_error = "out of memory"
    key = world.submit()
    world.run()
    assert world.error(key) == ErrorCode.UNAVAILABLE
    assert [world.core.state.ledger.used(rank) for rank in (0, 1)] == [0, 0]
    world.ranks[1].wake_error = ""
    world.later(2)
    assert world.states() == ["ready"]


def test_operations_of_one_model_are_serial() -> None:
    """Rule 5."""
    world = World(ranks=2).ready(wanted(ranks=(0,)), wanted(ranks=(1,)))
    park(world)
    while any(world.inboxes):
        sent = [command for inbox in world.inboxes for command in inbox]
        park(world, residency="resident")
        assert sum(isinstance(command, ParkShard | WakeShard) for command in sent) <= 2
        world.turn()
    world.run()
    assert world.states() == ["ready", "ready"]


def test_ranks_that_are_lost_leave_parked_models_cold() -> None:
    """Rule 11; nobody asks for them, so nobody loads them all at once."""
    world = both()
    world.lose_ranks()
    world.ranks_up()
    world.run()
    assert (world.states("a"), world.states("b")) == (["cold"], ["ready"])
    key = world.submit(model="a")
    world.run()
    assert world.texts[key] == expected_text((1, 2, 3), 4)


@pytest.mark.parametrize("turns", range(6))
def test_ranks_lost_at_any_moment_of_a_switch(turns: int) -> None:
    """Rule 11."""
    world = both()
    key = world.submit(model="a", max_tokens=3)
    for _ in range(turns):
        world.turn()
    world.lose_ranks()
    world.run()
    world.ranks_up()
    world.run()
    assert key in world.ends or key in world.texts
    again = [world.submit(model=model, max_tokens=2) for model in ("a", "b")]
    world.run()
    world.later(1)
    assert [world.texts[key] for key in again] == [expected_text((1, 2, 3), 2)] * 2


def test_a_new_driver_adopts_what_is_parked() -> None:
    """Ranks outlive the driver, and so do standby copies."""
    before = both()
    after = World(capacity_mib=ONE_FITS_MIB, up=False)
    after.ranks = before.ranks
    for rank in after.ranks:
        rank.tables.clear()
    after.core.on_ranks_up(after.now, {0: tuple(after.ranks[0].held(group_id) for group_id in after.ranks[0].shards)})
    after.assign(wanted("a"), wanted("b"))
    after.run()
    assert (after.states("a"), after.states("b")) == (["parked"], ["ready"])
    key = after.submit(model="a")
    after.run()
    assert after.texts[key] == expected_text((1, 2, 3), 4)
    assert (count(after, LoadShard), count(after, WakeShard), count(after, ParkShard)) == (0, 1, 1)


def test_what_is_parked_and_not_assigned_any_more_goes() -> None:
    world = both()
    world.assign(wanted("b"))
    world.run()
    assert world.states("a") == []
    assert len(world.ranks[0].shards) == 1


def test_a_parked_model_gets_a_new_generation() -> None:
    world = both()
    world.assign(wanted("a", generation=2, source="file:/other"), wanted("b"))
    world.run()
    world.later(1)
    assert [group.wanted.generation for group in world.core.state.of_model("a") if group.state in ("ready", "parked")] == [2]


def test_fields_that_contradict_each_other_are_refused() -> None:
    for changes in ({"residency": "resident", "idle_park_s": 5}, {"idle_park_s": 50, "idle_unload_s": 5}):
        with pytest.raises(ValueError, match="idle_"):
            ModelSpec.model_validate({"source": "file:/x", **changes})
    assert isinstance(wanted(idle_park_s=5), Wanted)
    assert FACTS.digest
