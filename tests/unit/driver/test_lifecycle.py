from __future__ import annotations

import pytest
from pool_world import HELD_MIB, LOAD_MIB, MIB, World, expected_text, spec, wanted

from gateway.api.config import CanarySpec, KvSpec, LimitsSpec, ScalingSpec
from gateway.api.errors import ErrorCode, YardError
from workers.driver.group import MAX_ATTEMPTS, load_key
from workers.messages import GrowKv, LoadShard, Progress, Step, UnloadShard


def commands(world: World, kind: type) -> list[object]:
    return [command for _, command in world.sent if isinstance(command, kind)]


def test_a_group_loads_is_checked_and_serves() -> None:
    world = World()
    world.assign(wanted())
    world.run()
    assert [kind for kind, _, _ in world.events] == ["loading", "checking", "ready"]
    assert world.canary_answers == [("m", "d1|torch|bf16|1|1|cpu", expected_text((1, 2, 3), 8))]
    assert world.group().ready_since > 0


def test_a_model_serves_only_after_its_canary_gave_the_right_answer() -> None:
    """Rule 8."""
    world = World()
    world.canary_problem["m"] = "canary of `m` was answered 'Lyon'"
    world.assign(wanted())
    key = world.submit()
    world.run()
    assert world.states() == ["failed"]
    assert "'Lyon'" in world.group().reason
    assert world.error(key) == ErrorCode.UNAVAILABLE
    assert "'Lyon'" in world.ends[key].error_message
    assert key not in world.texts
    assert world.core.state.ledger.used(0) == 0


def test_a_failed_load_gives_everything_back_on_all_ranks() -> None:
    """Rule 3: a failed step gives everything back."""
    world = World(ranks=2)
    world.ranks[1].load_error = "disk gone"
    world.assign(wanted(ranks=(0, 1), stages=2))
    world.run()
    assert world.states() == ["failed"]
    assert "rank 1: disk gone" in world.group().reason
    assert [world.core.state.ledger.used(rank) for rank in (0, 1)] == [0, 0]
    assert [rank.shards for rank in world.ranks] == [{}, {}]


def test_what_a_load_notes_becomes_an_event() -> None:
    world = World()
    world.assign(wanted())
    world.turn()
    assert world.group().op is not None
    world.core.on_progress(world.now, 0, Progress(world.group().op.id, 0.1, "converting"))  # type: ignore[union-attr]
    world.core.on_progress(world.now, 0, Progress(world.group().op.id, 0.2, "converting", "a file was damaged"))  # type: ignore[union-attr]
    assert [event for event in world.events if event[0] == "weights"] == [("weights", "m", "a file was damaged")]


def test_a_failed_load_is_tried_again_with_growing_pauses_and_not_for_ever() -> None:
    world = World()
    world.ranks[0].load_error = "disk gone"
    world.assign(wanted())
    world.run()
    pauses = []
    while world.group().retry_at is not None:
        pauses.append(round(world.group().retry_at - world.now))  # type: ignore[operator]
        world.later(pauses[-1] + 1)
    assert pauses == [1, 2, 4, 8]
    assert len(commands(world, LoadShard)) == MAX_ATTEMPTS
    assert "yard wake m" in world.group().reason
    world.ranks[0].load_error = ""
    world.later(1000)
    assert world.states() == ["failed"]
    world.assign(wanted(generation=2))
    world.run()
    assert world.states() == ["ready"]


def test_a_load_that_failed_gets_more_room_the_next_time() -> None:
    """Its footprint may have been estimated too low."""
    world = World(capacity_mib=400)
    world.ranks[0].load_error = "needs 90 MiB, its budget is 71 MiB"
    world.assign(wanted())
    world.run()
    world.later(1.5)
    budgets = [command.budget["weights"] for command in commands(world, LoadShard)]  # type: ignore[attr-defined]
    assert len(budgets) == 2
    assert budgets[0] < budgets[1]


def test_a_failed_load_that_heals_serves() -> None:
    world = World()
    world.ranks[0].load_error = "disk gone"
    world.assign(wanted())
    world.run()
    refused = world.submit()
    assert world.error(refused) == ErrorCode.UNAVAILABLE
    assert 0 < world.ends[refused].retry_after_s <= 30
    world.ranks[0].load_error = ""
    world.later(1.5)
    assert world.states() == ["ready"]


def test_a_checkpoint_that_cannot_be_read_fails_with_its_reason() -> None:
    world = World()
    world.facts["m"] = "/m.gguf: it is cut short; download it again"
    world.assign(wanted())
    world.run()
    assert "cut short" in world.group().reason
    assert commands(world, LoadShard) == []


def test_a_model_that_cannot_be_divided_so_says_why() -> None:
    world = World(ranks=3)
    world.assign(wanted(ranks=(0, 1, 2)))
    world.run()
    assert "8 attention heads do not divide by 3" in world.group().reason


def test_requests_of_a_loading_model_are_held_with_an_estimate_and_then_served() -> None:
    """Rule 6."""
    world = World()
    world.assign(wanted())
    keys = [world.submit((1, seed)) for seed in range(3)]
    assert all(world.holds[key][1] > 0 for key in keys)
    world.run()
    assert [world.texts[key] for key in keys] == [expected_text((1, seed), 4) for seed in range(3)]
    assert len(commands(world, LoadShard)) == 1


def test_a_deadline_shorter_than_the_estimate_is_refused_at_once() -> None:
    """Rule 6."""
    world = World()
    world.assign(wanted())
    key = world.submit(timeout_s=0.2)
    assert world.error(key) == ErrorCode.UNAVAILABLE
    assert world.ends[key].retry_after_s > 0.2
    assert "deadline" in world.ends[key].error_message


def test_held_requests_are_bounded_cancellable_and_expire() -> None:
    """Rule 6: held, bounded."""
    world = World()
    world.assign(wanted(limits=LimitsSpec(concurrency=1, queue=3, batch_tokens=32)))
    keys = [world.submit(timeout_s=60), *(world.submit() for _ in range(3))]
    assert world.error(keys[3]) == ErrorCode.EXHAUSTED
    world.core.on_cancel(world.now, keys[1])
    assert world.ends[keys[1]].finish_reason == "cancelled"
    world.now += 61
    world.core.on_tick(world.now)
    assert world.error(keys[0]) == ErrorCode.DEADLINE
    world.core.on_link_closed(world.now, 1)
    assert world.ends[keys[2]].finish_reason == "cancelled"


def test_an_unknown_model_is_unavailable_here() -> None:
    world = World().ready()
    key = world.submit(model="other")
    assert world.error(key) == ErrorCode.UNAVAILABLE
    assert "not in this pool" in world.ends[key].error_message


def test_a_model_that_is_taken_away_finishes_its_requests_first() -> None:
    """Rule 5: never pulls memory from under its requests."""
    world = World().ready()
    key = world.submit((1, 2), max_tokens=20)
    world.turn()
    world.assign()
    assert world.states() == ["draining"]
    late = world.submit((3, 4))
    assert world.error(late) == ErrorCode.UNAVAILABLE
    assert commands(world, UnloadShard) == []
    world.run()
    assert world.texts[key] == expected_text((1, 2), 20)
    assert world.states() == []
    assert world.core.state.ledger.used(0) == 0
    assert world.ranks[0].shards == {}


def test_a_new_generation_loads_beside_the_old_which_serves_until_then() -> None:
    world = World().ready()
    old = world.group()
    world.assign(wanted(generation=2, source="file:/other"))
    world.turn()
    assert sorted(world.states()) == ["loading", "ready"]
    during = world.submit((1, 2), max_tokens=3)
    assert world.core.state.sequences[during][0] is old
    world.run()
    assert world.texts[during] == expected_text((1, 2), 3)
    assert [(group.wanted.generation, group.state) for group in world.core.state.groups.values()] == [(2, "ready")]


def test_a_new_generation_waits_for_the_old_to_give_way_where_both_do_not_fit() -> None:
    world = World(capacity_mib=LOAD_MIB + 10).ready()
    key = world.submit((1, 2), max_tokens=10)
    world.assign(wanted(generation=2, source="file:/other"))
    world.turn()
    assert sorted(world.states()) == ["parking", "waiting"]
    assert "old generation makes room" in next(g.reason for g in world.core.state.groups.values() if g.state == "waiting")
    held = world.submit((3, 4), max_tokens=2)
    assert held in world.holds
    world.run()
    assert world.texts[key] == expected_text((1, 2), 10)
    assert world.texts[held] == expected_text((3, 4), 2)
    assert world.states() == ["ready"]


def test_a_new_generation_that_fails_leaves_the_old_serving() -> None:
    world = World().ready()
    world.ranks[0].load_error = "disk gone"
    world.assign(wanted(generation=2, source="file:/other"))
    world.run()
    assert sorted(world.states()) == ["failed", "ready"]
    key = world.submit()
    world.run()
    assert world.texts[key]


def test_a_change_that_needs_no_load_happens_in_place() -> None:
    world = World().ready()
    loads = len(commands(world, LoadShard))
    limits = LimitsSpec(concurrency=4, queue=99, batch_tokens=32)
    world.assign(wanted(generation=2, priority=3, limits=limits, canary=CanarySpec(expect="x"), replicas=2))
    world.run()
    group = world.group()
    assert (group.state, group.wanted.generation, group.spec.limits.queue, group.spec.priority) == ("ready", 2, 99, 3)
    assert len(commands(world, LoadShard)) == loads


def test_what_decides_about_a_load() -> None:
    assert load_key(spec()) == load_key(spec(priority=7, chat_template="x", scaling=ScalingSpec(max_replicas=4)))
    for change in ({"source": "file:/b"}, {"context": 64}, {"kv": KvSpec(floor=MIB)}, {"limits": LimitsSpec(concurrency=5)}):
        assert load_key(spec()) != load_key(spec(**change)), change


def test_the_same_assignment_again_changes_nothing() -> None:
    world = World().ready()
    sent = len(world.sent)
    world.assign(wanted())
    world.run()
    assert len(world.sent) == sent


def test_an_older_fence_is_refused() -> None:
    world = World().ready()
    world.assign(wanted(), fence=5)
    with pytest.raises(YardError, match="fence 4 is older than 5") as refused:
        world.assign(fence=4)
    assert refused.value.code == ErrorCode.CONFLICT
    assert world.states() == ["ready"]


@pytest.mark.parametrize("ranks", [(0, 0), (3,), (0, 1, 2)])
def test_an_assignment_that_names_ranks_wrongly_is_refused_whole(ranks: tuple[int, ...]) -> None:
    world = World(ranks=2).ready()
    with pytest.raises(YardError, match="rank"):
        world.assign(wanted("x", ranks=ranks, stages=1 if len(ranks) < 3 else 3))
    assert world.states() == ["ready"]


def test_a_model_that_does_not_fit_waits_with_the_numbers_and_loads_when_room_appears() -> None:
    """Rule 3 and 4."""
    world = World(capacity_mib=LOAD_MIB + 10)
    world.assign(wanted("a", residency="resident"), wanted("b"))
    world.run()
    assert (world.states("a"), world.states("b")) == (["ready"], ["waiting"])
    assert "MiB asked" in world.group("b").reason
    world.assign(wanted("b"))
    world.run()
    assert (world.states("a"), world.states("b")) == ([], ["ready"])


def test_who_gets_in_does_not_depend_on_the_order_of_the_list() -> None:
    """Rule 4."""
    for order in (("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a")):
        world = World(capacity_mib=HELD_MIB + LOAD_MIB + 10)
        world.assign(*(wanted(model, priority=5 if model == "c" else 0) for model in order))
        world.run()
        assert [world.states(model) for model in "abc"] == [["parked"], ["ready"], ["ready"]]


def test_loading_one_model_does_not_delay_the_steps_of_another() -> None:
    """Rule 7."""
    world = World().ready(wanted("a"))
    key = world.submit(model="a", max_tokens=10)
    world.assign(wanted("a"), wanted("b"))
    world.turn()
    assert world.states("b") == ["loading"]
    world.inboxes[0] = type(world.inboxes[0])(command for command in world.inboxes[0] if isinstance(command, Step))
    world.run()
    assert world.texts[key] == expected_text((1, 2, 3), 10)
    assert world.states("b") == ["loading"]


def test_two_replicas_of_a_model_share_its_requests() -> None:
    world = World(ranks=2).ready(wanted(ranks=(0,)), wanted(ranks=(1,)))
    keys = [world.submit((1, seed), max_tokens=10) for seed in range(8)]
    groups = [world.core.state.sequences[key][0].id for key in keys]
    assert sorted(groups.count(group) for group in set(groups)) == [4, 4]
    world.run()


def test_a_lost_rank_ends_all_requests_at_once_and_everything_starts_again_as_one() -> None:
    """Rule 11."""
    world = World(ranks=2).ready(wanted("a", ranks=(0, 1), stages=2), wanted("b", ranks=(1,)))
    keys = [world.submit(model=model, max_tokens=50) for model in ("a", "b", "b")]
    world.turn()
    world.lose_ranks("rank 1 (pid 7) is gone")
    for key in keys:
        assert world.error(key) == ErrorCode.UNAVAILABLE
        assert "rank 1 (pid 7) is gone" in world.ends[key].error_message
        assert world.ends[key].retry_after_s > 0
    assert world.restarts == ["rank 1 (pid 7) is gone"]
    assert world.core.state.ledger.used(0) == world.core.state.ledger.used(1) == 0
    early = world.submit(model="b", max_tokens=3)
    assert early not in world.holds, "nobody knows when they are back, and another pool may have the model"
    assert world.error(early) == ErrorCode.UNAVAILABLE
    assert "rank 1 (pid 7) is gone" in world.ends[early].error_message
    world.ranks_up()
    world.run()
    later = world.submit(model="b", max_tokens=3)
    world.run()
    assert world.texts[later] == expected_text((1, 2, 3), 3)
    assert (world.states("a"), world.states("b")) == (["ready"], ["ready"])


def test_what_waits_for_a_load_is_let_go_when_ranks_are_lost() -> None:
    """Rule 11: requests that a pool holds do not wait for ranks that may never come back."""
    world = World()
    world.assign(wanted())
    held = world.submit()
    assert held in world.holds
    world.lose_ranks("node n2 is gone")
    assert world.error(held) == ErrorCode.UNAVAILABLE
    assert "node n2 is gone" in world.ends[held].error_message


def test_a_rank_lost_while_loading_or_checking_starts_again() -> None:
    for turns in range(8):
        world = World()
        world.assign(wanted())
        for _ in range(turns):
            world.turn()
        world.lose_ranks()
        world.run()
        world.ranks_up()
        world.run()
        assert world.states() == ["ready"], turns


def test_a_step_that_never_ends_restarts_the_ranks() -> None:
    """Rule 11: health is forward progress."""
    world = World().ready()
    key = world.submit()
    world.now += 30
    world.core.on_tick(world.now)
    assert world.core.stalled_s(world.now) == pytest.approx(30)
    assert world.restarts == []
    world.now += 100
    world.core.on_tick(world.now)
    assert world.restarts
    assert world.error(key) == ErrorCode.UNAVAILABLE


def test_a_new_driver_adopts_what_ranks_hold_without_loading() -> None:
    """Ranks outlive the driver."""
    before = World(ranks=2).ready(wanted("a", ranks=(0, 1), stages=2), wanted("b", ranks=(1,)))
    before.submit(model="b", max_tokens=50)
    before.turn()
    after = World(ranks=2, up=False)
    after.ranks = before.ranks
    for rank in after.ranks:
        rank.tables.clear()
    used = [before.core.state.ledger.used(rank) for rank in (0, 1)]
    after.core.on_ranks_up(after.now, {rank.rank: tuple(rank.held(group_id) for group_id in rank.shards) for rank in after.ranks})
    after.run()
    assert (after.states("a"), after.states("b")) == (["ready"], ["ready"])
    after.assign(wanted("a", ranks=(0, 1), stages=2, generation=4), wanted("b", ranks=(1,)))
    after.run()
    assert after.group("a").wanted.generation == 4
    assert commands(after, LoadShard) == []
    assert [after.core.state.ledger.used(rank) for rank in (0, 1)] == used
    key = after.submit(model="a", max_tokens=3)
    after.run()
    assert after.texts[key] == expected_text((1, 2, 3), 3)


def test_pieces_of_a_group_are_unloaded_at_adoption() -> None:
    before = World(ranks=2).ready(wanted("a", ranks=(0, 1), stages=2))
    after = World(ranks=2, up=False)
    after.ranks = before.ranks
    held = {0: tuple(before.ranks[0].held(group_id) for group_id in before.ranks[0].shards), 1: ()}
    after.core.on_ranks_up(after.now, held)
    after.run()
    assert after.ranks[0].shards == {}
    after.assign(wanted("a", ranks=(0, 1), stages=2))
    assert max(after.core.state.groups) > max(before.core.state.groups)


def test_what_was_adopted_and_is_not_assigned_any_more_drains() -> None:
    before = World().ready(wanted("a"))
    after = World(up=False)
    after.ranks = before.ranks
    after.core.on_ranks_up(after.now, {0: tuple(before.ranks[0].held(group_id) for group_id in before.ranks[0].shards)})
    after.assign()
    after.run()
    assert after.states("a") == []
    assert after.ranks[0].shards == {}
    assert after.core.state.ledger.used(0) == 0


def test_a_driver_that_stops_finishes_what_runs_and_takes_nothing_new() -> None:
    world = World().ready()
    running = world.submit((1, 2), max_tokens=5)
    world.core.on_closing(world.now)
    late = world.submit((3, 4))
    assert world.error(late) == ErrorCode.UNAVAILABLE
    world.run()
    assert world.texts[running] == expected_text((1, 2), 5)


def test_lifecycle_operations_of_one_model_are_serial() -> None:
    """Rule 5."""
    world = World(ranks=3)
    world.assign(wanted(ranks=(0,)), wanted(ranks=(1,)), wanted("b", ranks=(2,)))
    while world.pending:
        world.pending.popleft()()
    assert sorted(world.states("m")) == ["loading", "waiting"]
    assert world.states("b") == ["loading"], "another model loads meanwhile, on another rank"
    world.run()
    assert [*world.states("m"), *world.states("b")] == ["ready"] * 3


def test_a_group_that_fails_while_its_kv_changes_is_unloaded_once() -> None:
    before = World(capacity_mib=160).ready(wanted("a"))
    held = before.ranks[0].held(before.group("a").id)
    after = World(capacity_mib=160, up=False)
    after.ranks = before.ranks
    after.ranks[0].blocks[held.group_id] = 90
    after.ranks[0].tables.clear()
    after.canary_problem["a"] = "wrong"
    after.core.on_ranks_up(after.now, {0: (after.ranks[0].held(held.group_id),)})
    after.assign(wanted("a"))
    while not after.canary_answers:
        after.turn()
    after.assign(wanted("a"), wanted("b"))
    after.pending.rotate(1)  # what is known of b comes before the judgement of a
    after.pending.popleft()()
    assert after.states("a") == ["checking"]
    assert any(isinstance(command, GrowKv) for command in after.inboxes[0]), "memory is being called back for b"
    while after.pending:
        after.pending.popleft()()
    assert after.states("a") == ["failed"]
    after.run()
    assert len(commands(after, UnloadShard)) == 1
    assert after.states("b") == ["ready"]
