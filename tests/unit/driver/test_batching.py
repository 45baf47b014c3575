from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_world import BLOCK_TOKENS, EOS, LOAD_MIB, MIB, World, expected_text, next_token, wanted

from gateway.api.config import KvSpec, LimitsSpec
from gateway.api.errors import ErrorCode
from workers.driver.estimates import CHECK_ESTIMATE_S
from workers.driver.sequence import Request
from workers.messages import Sampling, StepDone


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed * 7 + index * index) % 48 for index in range(length))


def test_tokens_go_out_and_end_with_length() -> None:
    world = World().ready()
    key = world.submit((1, 2, 3), max_tokens=5)
    world.run()
    assert world.texts[key] == expected_text((1, 2, 3), 5)
    end = world.ends[key]
    assert (end.finish_reason, end.prompt_tokens, end.completion_tokens, end.stop_token_id) == ("length", 3, 5, -1)


def test_a_stop_token_ends_and_is_not_emitted() -> None:
    world = World().ready()
    text = expected_text((1, 2, 3), 10)
    at = next(index for index in range(1, 10) if text[index] not in text[:index])
    key = world.submit((1, 2, 3), max_tokens=10, stop_token_ids=frozenset({text[at]}))
    world.run()
    assert world.texts[key] == text[:at]
    assert (world.ends[key].finish_reason, world.ends[key].stop_token_id) == ("stop", text[at])
    assert world.ends[key].completion_tokens == at + 1


def test_eos_ends_unless_it_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pool_world.next_token", lambda tokens: EOS if len(tokens) == 12 else 5)
    world = World().ready()
    ends, goes_on = world.submit(prompt(10), max_tokens=8), world.submit(prompt(10), max_tokens=8, ignore_eos=True)
    world.run()
    assert (world.texts[ends], world.ends[ends].stop_token_id) == ([5, 5], EOS)
    assert (world.texts[goes_on][:4], world.ends[goes_on].finish_reason) == ([5, 5, EOS, 5], "length")


def test_the_context_ends_what_has_no_limit() -> None:
    world = World().ready()
    key = world.submit(prompt(250), max_tokens=0)
    world.run()
    assert (world.ends[key].finish_reason, world.ends[key].completion_tokens) == ("length", 6)


@pytest.mark.parametrize(
    ("tokens", "says"), [((), "no tokens"), ((3, 99), "outside its vocabulary"), (tuple([1] * 256), "at most 255 fit")]
)
def test_a_prompt_that_cannot_be_computed_is_refused(tokens: tuple[int, ...], says: str) -> None:
    world = World().ready()
    key = world.submit(tokens)
    assert world.error(key) == ErrorCode.INVALID
    assert says in world.ends[key].error_message


def test_a_long_prompt_is_computed_in_chunks_between_the_decodes_of_others() -> None:
    """Rule 7, inside a group: a long prefill does not hold up who is generating."""
    world = World().ready()
    short = world.submit((1, 2, 3), max_tokens=20)
    world.turn()
    long = world.submit(prompt(200), max_tokens=2)
    world.run()
    mixed = [step for step in world.steps() if len(step.sequences) == 2]
    assert len(mixed) >= 6
    assert all(sum(len(part.tokens) for part in step.sequences) <= 32 for step in world.steps())
    assert world.texts[short] == expected_text((1, 2, 3), 20)
    assert world.texts[long] == expected_text(prompt(200), 2)


def test_a_known_prefix_is_not_computed_again() -> None:
    world = World().ready()
    first = world.submit(prompt(100), max_tokens=2)
    world.run()
    again = world.submit((*prompt(100), 1, 2, 3), max_tokens=2)
    world.run()
    assert world.ends[first].cached_tokens == 0
    assert world.ends[again].cached_tokens == 100 // BLOCK_TOKENS * BLOCK_TOKENS
    assert world.texts[again] == expected_text((*prompt(100), 1, 2, 3), 2)


def test_a_prompt_that_is_cached_whole_computes_its_last_token() -> None:
    world = World().ready()
    world.submit(prompt(64), max_tokens=1)
    world.run()
    again = world.submit(prompt(64), max_tokens=3)
    world.run()
    assert world.ends[again].cached_tokens == 48
    assert world.texts[again] == expected_text(prompt(64), 3)


def test_the_whole_prompt_goes_along_where_a_penalty_needs_it() -> None:
    world = World().ready()
    world.submit(prompt(40), max_tokens=1)
    world.core.on_submit(world.now, Request((1, 99), "m", prompt(40), 1, Sampling(repetition_penalty=1.2)))
    world.run()
    news = [part.new for step in world.steps() for part in step.sequences if part.new is not None]
    assert [len(new.prompt) for new in news[-2:]] == [0, 40]


def plan_ahead(world: World) -> World:
    """As for a GPU."""
    batcher = world.group().batcher
    assert batcher is not None
    batcher.ahead = 1
    return world


def test_a_step_is_planned_while_the_one_before_it_is_computed() -> None:
    world = plan_ahead(World().ready())
    before = len(world.steps())
    keys = [world.submit(prompt(length, length), max_tokens=20) for length in (3, 50)]
    most = 0
    while world.turn():
        most = max(most, len(world.group().steps))
    assert most == 2
    assert [world.texts[key] for key in keys] == [expected_text(prompt(length, length), 20) for length in (3, 50)]
    parts = [part for step in world.steps()[before:] for part in step.sequences]
    decodes = [part for part in parts if part.start >= 50]
    assert decodes
    assert not any(part.tokens for part in decodes), "the rank uses its own last sample"
    assert sum(part.sample for part in parts) == 40, "nothing was computed beyond the end"


def test_what_was_planned_beyond_a_stop_token_is_dropped() -> None:
    world = plan_ahead(World().ready())
    text = expected_text((1, 2, 3), 10)
    at = next(index for index in range(1, 10) if text[index] not in text[:index])
    key = world.submit((1, 2, 3), max_tokens=30, stop_token_ids=frozenset({text[at]}))
    world.run()
    assert world.texts[key] == text[:at]
    assert world.group().batcher.blocks.used == 0  # type: ignore[union-attr]


def test_planning_ahead_leaves_room_for_preemption() -> None:
    """Who is computed cannot be preempted: a group that is short of blocks stops planning ahead until it is not."""
    world = plan_ahead(small_kv())
    keys = [world.submit(prompt(40, seed), max_tokens=100) for seed in range(4)]
    world.run()
    assert world.group().batcher.preemptions > 0  # type: ignore[union-attr]
    assert [world.texts[key] for key in keys] == [expected_text(prompt(40, seed), 100) for seed in range(4)]


def small_kv(**changes: object) -> World:
    """16 blocks of KV and no more: one full context, shared by four sequences."""
    limits = LimitsSpec(concurrency=4, queue=8, batch_tokens=32)
    return World(capacity_mib=LOAD_MIB).ready(wanted(limits=limits, kv=KvSpec(floor=16 * MIB, ceiling=16 * MIB), **changes))


def test_when_kv_runs_out_the_newest_is_preempted_and_its_text_stays_the_same() -> None:
    world = small_kv()
    keys = [world.submit(prompt(40, seed), max_tokens=100) for seed in range(4)]
    world.run()
    batcher = world.group().batcher
    assert batcher is not None
    assert batcher.preemptions > 0
    for seed, key in enumerate(keys):
        assert world.texts[key] == expected_text(prompt(40, seed), 100)
    ended = list(world.ends)
    assert ended.index(keys[0]) < ended.index(keys[3])


def test_lower_priority_gives_way_first() -> None:
    world = small_kv()
    low = world.submit(prompt(60, 1), max_tokens=100, priority=-5)
    high = world.submit(prompt(60, 2), max_tokens=100, priority=5)
    world.run()
    assert list(world.ends).index(high) < list(world.ends).index(low)
    again = [part for step in world.steps() for part in step.sequences if part.new is not None and part.new.generated]
    assert again, "nothing was preempted"
    assert world.texts[low] == expected_text(prompt(60, 1), 100)


def test_cancel_takes_effect_within_a_step() -> None:
    """Rule 10: a client that left is cancelled within a step, also before the first token."""
    world = World().ready()
    key = world.submit(prompt(100), max_tokens=50)
    other = world.submit((1, 2), max_tokens=3)
    assert world.inboxes[0], "its first chunk is being computed"
    world.core.on_cancel(world.now, key)
    assert world.ends[key].finish_reason == "cancelled"
    before = len(world.steps())
    world.run()
    named = {part.sequence for step in world.steps()[before:] for part in step.sequences}
    assert len(named) == 1, "only the other one is computed after the cancel"
    assert key not in world.texts
    assert world.texts[other] == expected_text((1, 2), 3)
    assert world.group().batcher.blocks.used == 0  # type: ignore[union-attr]


def test_a_closed_link_cancels_all_that_came_over_it() -> None:
    world = World().ready()
    gone = [world.submit(prompt(30, seed), max_tokens=50, link=1) for seed in range(3)]
    stays = world.submit((1, 2), max_tokens=3, link=2)
    world.turn()
    world.core.on_link_closed(world.now, 1)
    world.run()
    assert all(world.ends[key].finish_reason == "cancelled" for key in gone)
    assert world.ends[stays].finish_reason == "length"


def test_a_deadline_that_expired_in_the_queue_never_reaches_a_rank() -> None:
    """Rule 10."""
    world = World().ready(wanted(limits=LimitsSpec(concurrency=1, queue=8, batch_tokens=32)))
    first = world.submit(prompt(20), max_tokens=50)
    late = world.submit((7, 7, 7), max_tokens=5, timeout_s=0.1)
    already = world.submit((8, 8, 8), max_tokens=5, timeout_s=0.0)
    world.run()
    assert world.ends[first].finish_reason == "length"
    for key, tokens in ((late, (7, 7, 7)), (already, (8, 8, 8))):
        assert world.error(key) == ErrorCode.DEADLINE
        assert not any(part.tokens == tokens for step in world.steps() for part in step.sequences)


def test_a_running_sequence_ends_at_its_deadline() -> None:
    world = World().ready()
    key = world.submit((1, 2), max_tokens=200, timeout_s=0.5)
    for _ in range(10):
        world.turn()
    world.later(1.0)
    assert world.error(key) == ErrorCode.DEADLINE
    assert 0 < len(world.texts[key]) < 200


def test_a_full_queue_is_refused_with_a_time_to_try_again() -> None:
    world = World().ready(wanted(limits=LimitsSpec(concurrency=1, queue=2, batch_tokens=32)))
    keys = [world.submit((1, seed), max_tokens=5) for seed in range(5)]
    refused = [key for key in keys if key in world.ends]
    assert len(refused) == 2
    assert all(world.error(key) == ErrorCode.EXHAUSTED and world.ends[key].retry_after_s > 0 for key in refused)
    world.run()
    assert [world.ends[key].finish_reason for key in keys[:3]] == ["length"] * 3


def test_a_full_queue_beside_a_replica_that_loads_names_the_sooner_of_the_two() -> None:
    world = World(ranks=2)
    limits = LimitsSpec(concurrency=1, queue=1, batch_tokens=32)
    world.assign(wanted("m", (0,), limits=limits))
    world.run()
    world.core.state.load_times_s["m"] = 7.0
    world.assign(wanted("m", (0,), limits=limits), wanted("m", (1,), limits=limits))
    while "loading" not in world.states("m"):
        world.turn(loads=False)
    for seed in range(2):
        world.submit((1, seed), max_tokens=5)
    [group] = [group for group in world.core.state.of_model("m") if group.state == "ready"]

    def retry_after_s(drain_s: float) -> float:
        group.tokens_per_s = group.outstanding_tokens / drain_s if drain_s else 0.0
        refused = world.submit((1, 9), max_tokens=5)
        assert world.error(refused) == ErrorCode.EXHAUSTED
        return world.ends[refused].retry_after_s

    assert 7.0 < retry_after_s(20.0) <= 7.0 + CHECK_ESTIMATE_S
    assert retry_after_s(0.0) == retry_after_s(20.0), "how fast it is has not been seen"
    assert retry_after_s(3.0) == pytest.approx(3.0)


def test_a_failed_step_ends_its_own_requests_only() -> None:
    world = World().ready(wanted("a"), wanted("b"))
    hit, safe = world.submit((1, 2), model="a", max_tokens=5), world.submit((3, 4), model="b", max_tokens=5)
    step = next(step for step in reversed(world.steps()) if step.group_id == world.group("a").id)
    world.inboxes[0] = type(world.inboxes[0])(command for command in world.inboxes[0] if command is not step)
    world.core.on_step_done(world.now, StepDone(step.step, step.group_id, (), 0.0, error="bad weights"))
    world.run()
    assert world.error(hit) == ErrorCode.INTERNAL
    assert "bad weights" in world.ends[hit].error_message
    assert world.ends[safe].finish_reason == "length"


def test_groups_of_a_pool_take_turns() -> None:
    """Rule 7: model A's work never delays B's beyond its own turn."""
    world = World().ready(wanted("a"), wanted("b"))
    world.submit(prompt(20), model="a", max_tokens=30)
    world.submit(prompt(20), model="b", max_tokens=30)
    before = len(world.steps())
    world.run()
    order = [step.group_id for step in world.steps()[before - 2 :]]
    assert all(left != right for left, right in itertools.pairwise(order))


def test_a_pipeline_group_keeps_one_step_a_stage_in_flight_of_disjoint_sequences() -> None:
    world = World(ranks=2).ready(wanted(ranks=(0, 1), stages=2))
    keys = [world.submit(prompt(5, seed), max_tokens=30) for seed in range(4)]
    most = 0
    for _ in range(200):
        group = world.group()
        members = [sequence for step in group.steps.values() for sequence in step.plan.members]
        assert len(members) == len(set(members))
        most = max(most, len(group.steps))
        world.turn()
    world.run()
    assert most == 2
    assert max(len(step.sequences) for step in world.steps()) == 2, "a step takes its share, so that the other stage has one too"
    for seed, key in enumerate(keys):
        assert world.texts[key] == expected_text(prompt(5, seed), 30)


def test_every_rank_of_a_group_gets_the_same_commands_in_the_same_order() -> None:
    world = World(ranks=3).ready(
        wanted("a", ranks=(0, 1), stages=2), wanted("b", ranks=(1, 2), stages=1), wanted("c", ranks=(1,))
    )
    for seed in range(6):
        world.submit(prompt(30, seed), model="abc"[seed % 3], max_tokens=10)
    world.run()

    def steps(rank: int, models: str) -> list[int]:
        groups = {world.group(model).id for model in models}
        return [
            command.step for to, command in world.sent if to == rank and hasattr(command, "step") and command.group_id in groups
        ]

    assert steps(0, "a") == steps(1, "a")
    assert steps(1, "b") == steps(2, "b")
    assert steps(1, "abc") == sorted(steps(1, "abc"))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), stages=st.integers(1, 2), blocks=st.integers(16, 24), concurrency=st.integers(1, 5), ahead=st.booleans())
def test_no_schedule_changes_a_text(data: st.DataObject, stages: int, blocks: int, concurrency: int, ahead: bool) -> None:
    """Whatever arrives, is cancelled, preempted, shared or chunked: who ends normally has the text of an empty pool."""
    limits = LimitsSpec(concurrency=concurrency, queue=100, batch_tokens=data.draw(st.integers(16, 64)))
    kv = KvSpec(floor=0, ceiling=blocks * MIB // stages, block_tokens=BLOCK_TOKENS)
    world = World(ranks=stages, capacity_mib=LOAD_MIB + 24).ready(
        wanted(ranks=tuple(range(stages)), stages=stages, limits=limits, kv=kv)
    )
    if ahead and stages == 1:
        plan_ahead(world)
    asked: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}
    for _ in range(data.draw(st.integers(5, 25))):
        action = data.draw(st.sampled_from(["submit", "submit", "cancel", "turn", "turn"]))
        if action == "submit":
            tokens, count = prompt(data.draw(st.integers(1, 120)), data.draw(st.integers(0, 2))), data.draw(st.integers(1, 90))
            asked[world.submit(tokens, max_tokens=count, priority=data.draw(st.integers(-1, 1)))] = (tokens, count)
        elif action == "cancel" and asked:
            world.core.on_cancel(world.now, data.draw(st.sampled_from(sorted(asked))))
        else:
            for _ in range(data.draw(st.integers(1, 10))):
                world.turn()
    world.run()
    for key, (tokens, count) in asked.items():
        whole = expected_text(tokens, count)
        got = world.texts.get(key, [])
        if world.ends[key].finish_reason == "length":
            assert got == whole
        else:
            assert world.ends[key].finish_reason == "cancelled"
            assert got == whole[: len(got)]
    assert not world.core.state.sequences
    assert world.group().batcher.blocks.used == 0  # type: ignore[union-attr]


def test_the_simulated_ranks_would_notice() -> None:
    """The world's own check: another context gives another token."""
    assert next_token((1, 2, 3)) != next_token((1, 2, 4)) or next_token((1, 2, 3)) != next_token((2, 2, 3))
