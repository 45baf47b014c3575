from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from pool_world import MIB, World, expected_text, wanted
from test_batching import prompt

from gateway.api.config import KvSpec, LimitsSpec
from workers.driver.elastic import GIVE_BACK_AFTER_S
from workers.driver.group import Wanted
from workers.messages import GrowKv

LIMITS = LimitsSpec(concurrency=8, queue=64, batch_tokens=64)


def growths(world: World) -> list[int]:
    return [command.blocks for _, command in world.sent if isinstance(command, GrowKv)]


def kv_used(world: World, model: str, rank: int = 0) -> int:
    return world.core.state.ledger.held(world.group(model).id, "kv_used").get(rank, 0)


def busy(world: World, model: str = "m", sequences: int = 6, tokens: int = 150) -> list[tuple[int, int]]:
    return [world.submit(prompt(60, seed), model=model, max_tokens=tokens) for seed in range(sequences)]


def test_kv_grows_in_chunks_after_the_ledger_took_the_bytes() -> None:
    """Rule 3: memory is reserved before it is mapped."""
    world = World(capacity_mib=300).ready(wanted(limits=LIMITS))
    floor = world.group().kv_blocks
    keys = busy(world)
    while not growths(world):
        world.turn()
    assert growths(world)[0] == floor + 16
    assert kv_used(world, "m") == 16 * MIB
    assert world.ranks[0].blocks[world.group().id] == floor
    world.run()
    batcher = world.group().batcher
    assert batcher is not None
    assert batcher.preemptions == 0
    assert [world.texts[key] for key in keys] == [expected_text(prompt(60, seed), 150) for seed in range(6)]


def test_a_burst_of_prompts_gets_its_memory_in_one_go() -> None:
    """Growing prompt by prompt would compute them prompt by prompt, in small steps."""
    limits = LimitsSpec(concurrency=8, queue=64, batch_tokens=1024)
    world = World(capacity_mib=300).ready(wanted(limits=limits))
    busy(world, sequences=1, tokens=5)
    for seed in range(7):
        world.submit(prompt(200, seed), max_tokens=5)
    world.run()
    assert max(growths(world)) >= 5 * 13
    assert len(growths(world)) <= 3


def test_kv_never_grows_above_its_ceiling() -> None:
    world = World(capacity_mib=300).ready(wanted(limits=LIMITS, kv=KvSpec(floor=16 * MIB, ceiling=40 * MIB)))
    busy(world)
    world.run()
    assert max(growths(world)) == 40


def test_idle_memory_is_given_back() -> None:
    world = World(capacity_mib=300).ready(wanted(limits=LIMITS))
    busy(world)
    world.run()
    assert kv_used(world, "m") > 0
    world.later(0.1)
    world.later(GIVE_BACK_AFTER_S + 1)
    assert kv_used(world, "m") == 0
    assert world.group().kv_blocks == world.ranks[0].blocks[world.group().id] == 16


def test_growth_that_fails_on_one_rank_is_undone_on_all() -> None:
    """Rule 3."""
    world = World(ranks=2, capacity_mib=300).ready(wanted(ranks=(0, 1), stages=2, limits=LIMITS))
    floor = world.group().kv_blocks
    world.ranks[1].grow_error = "the machine has no memory left"
    keys = busy(world, sequences=8, tokens=190)
    world.run()
    world.later(1)
    group = world.group()
    assert [rank.blocks[group.id] for rank in world.ranks] == [floor, floor]
    assert kv_used(world, "m", 0) == kv_used(world, "m", 1) == 0
    assert any(kind == "kv_failed" and "no memory left" in text for kind, _, text in world.events)
    assert [world.texts[key] for key in keys] == [expected_text(prompt(60, seed), 190) for seed in range(8)]


def test_what_one_model_does_not_need_another_gets_at_once() -> None:
    world = World(capacity_mib=180).ready(wanted("a", limits=LIMITS), wanted("b", limits=LIMITS))
    busy(world, "a")
    world.run()
    had = kv_used(world, "a")
    assert had > 0
    keys = busy(world, "b")
    world.run()
    assert kv_used(world, "a") < had
    assert kv_used(world, "b") > 0
    assert [world.texts[key] for key in keys] == [expected_text(prompt(60, seed), 150) for seed in range(6)]


def test_a_load_takes_back_kv_above_the_floors_even_from_the_busy() -> None:
    """Rule 4: what a model holds above its floor never decides whether another one fits."""
    world = World(capacity_mib=180).ready(wanted("a", limits=LIMITS))
    keys = busy(world, "a", sequences=8, tokens=190)
    while kv_used(world, "a") < 90 * MIB:
        world.turn()
    world.assign(wanted("a", limits=LIMITS), wanted("b", limits=LIMITS))
    while world.states("b") != ["ready"]:
        assert world.turn()
    assert not any(key in world.ends for key in keys), "it waited for the others to end"
    world.run()
    assert [world.texts[key] for key in keys] == [expected_text(prompt(60, seed), 190) for seed in range(8)]


def test_two_greedy_models_share_what_is_there() -> None:
    world = World(capacity_mib=160).ready(wanted("a", limits=LIMITS), wanted("b", limits=LIMITS))
    first = busy(world, "a", sequences=8, tokens=190)
    for _ in range(100):
        world.turn()
    second = busy(world, "b", sequences=8, tokens=190)
    smallest_difference = 10**9
    while set(first + second) - set(world.ends):
        assert world.turn()
        smallest_difference = min(smallest_difference, abs(kv_used(world, "a") - kv_used(world, "b")))
    assert smallest_difference <= 32 * MIB
    for seed in range(8):
        assert world.texts[first[seed]] == world.texts[second[seed]] == expected_text(prompt(60, seed), 190)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), capacity=st.integers(70, 260), ranks=st.integers(1, 2))
def test_no_sequence_of_events_exceeds_capacity_or_leaks(data: st.DataObject, capacity: int, ranks: int) -> None:
    """Rules 3 and 4: loads, growth, failures, losses, removals in any order; afterwards the pool is as a new one."""
    world = World(ranks=ranks, capacity_mib=capacity)
    choices = {
        "a": wanted("a", limits=LIMITS),
        "b": wanted("b", ranks=tuple(range(ranks)), stages=ranks, limits=LIMITS),
        "c": wanted("c", ranks=(ranks - 1,), limits=LIMITS, priority=2),
    }
    for _ in range(data.draw(st.integers(3, 30))):
        action = data.draw(st.sampled_from(["assign", "submit", "submit", "turns", "turns", "lose", "break", "mend", "later"]))
        if action == "assign":
            names = data.draw(st.sets(st.sampled_from("abc")))
            generation = data.draw(st.integers(1, 2))
            world.assign(*(wanted_again(choices[name], generation) for name in sorted(names)))
        elif action == "submit":
            tokens = prompt(data.draw(st.integers(1, 150)), data.draw(st.integers(0, 3)))
            world.submit(tokens, model=data.draw(st.sampled_from("abc")), max_tokens=data.draw(st.integers(1, 100)))
        elif action == "turns":
            for _ in range(data.draw(st.integers(1, 60))):
                world.turn()
        elif action == "lose":
            world.lose_ranks()
            world.ranks_up()
        elif action == "later":
            world.now += data.draw(st.sampled_from([0.3, 3.0, 15.0]))
            world.core.on_tick(world.now)
        else:
            for rank in world.ranks:
                rank.load_error = rank.grow_error = "broken" if action == "break" else ""
        for rank, simulated in enumerate(world.ranks):
            assert world.core.state.ledger.used(rank) <= capacity * MIB
            assert sum(simulated.held(group).bytes[kind] for group in simulated.shards for kind in ("kv",)) <= capacity * MIB
    for rank in world.ranks:
        rank.load_error = rank.grow_error = ""
    world.run()
    for _ in range(12):
        world.later(31)
    assert not world.core.state.sequences
    world.assign()
    world.run()
    assert not world.core.state.groups
    assert all(world.core.state.ledger.used(rank) == 0 for rank in range(ranks))
    assert all(not rank.shards for rank in world.ranks)
    assert set(world.ends) >= set(world.texts)


def wanted_again(item: Wanted, generation: int) -> Wanted:
    if generation == 1:
        return item
    other = item.spec.model_copy(update={"source": "file:/other"})
    return replace(item, generation=2, spec=other, spec_json=other.model_dump_json())
