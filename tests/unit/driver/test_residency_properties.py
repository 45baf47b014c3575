"""Whatever the order of loads, wakes, parks, growth and failures: nothing takes more than there is, everybody gets an end."""

from __future__ import annotations

import contextlib

import pool_world
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_world import HELD_MIB, LOAD_MIB, MIB, World, expected_text

from gateway.api.config import KvSpec, LimitsSpec
from gateway.api.errors import YardError
from workers.driver.group import Wanted

MODELS = ("a", "b", "c")
FLOOR_MIB = 96
CAPACITY_MIB = LOAD_MIB - 16 + FLOOR_MIB + 30  # one and some KV beside it; two never
assert CAPACITY_MIB < 2 * (HELD_MIB - 16 + FLOOR_MIB)
WEIGHTS_MIB = 9

RANKS = {"a": (0, 1), "b": (0,), "c": (1,)}

moves = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from(MODELS), st.integers(1, 60)),
    st.tuples(st.just("turns"), st.integers(1, 8)),
    st.tuples(st.just("later"), st.sampled_from([0.1, 2.5, 40.0])),
    st.tuples(st.just("set"), st.sampled_from(MODELS), st.sampled_from(["resident", "parked", "cold"])),
    st.tuples(st.just("cancel")),
    st.tuples(st.just("errors"), st.sampled_from(["load_error", "park_error", "wake_error", "grow_error", ""])),
    st.tuples(st.just("assign"), st.sets(st.sampled_from(MODELS))),
    st.tuples(st.just("upgrade"), st.sampled_from(MODELS)),
    st.tuples(st.just("lose")),
)


def wanted(model: str, generation: int = 1) -> Wanted:
    return pool_world.wanted(
        model,
        RANKS[model],
        stages=len(RANKS[model]),
        kv=KvSpec(floor=FLOOR_MIB * MIB, block_tokens=16),
        limits=LimitsSpec(concurrency=3, queue=5, batch_tokens=32),
        idle_park_s=30,
        generation=generation,
        context=256 - generation % 2,  # some go back
    )


class Story:
    def __init__(self, standby_mib: int) -> None:
        self.world = World(ranks=2, capacity_mib=CAPACITY_MIB)
        self.world.core.on_host_memory(0, dict.fromkeys((0, 1), standby_mib * MIB))
        self.standby_mib = standby_mib
        self.generations: dict[str, int] = dict.fromkeys(MODELS, 1)
        self.keys: dict[tuple[int, int], int] = {}
        self.world.assign(*map(wanted, MODELS))
        self.check()

    def tell(self, move: tuple) -> None:
        world = self.world
        match move:
            case ("submit", model, tokens):
                self.keys[world.submit((1, tokens % 40), max_tokens=tokens, model=model)] = tokens
            case ("turns", count):
                for _ in range(count):
                    world.turn()
                    self.check()
            case ("later", seconds):
                world.now += seconds
                world.core.on_tick(world.now)
            case ("set", model, residency):
                with contextlib.suppress(YardError):
                    world.core.on_set_residency(world.now, 0, model, residency)
            case ("cancel",):
                for key in [key for key in self.keys if key not in world.ends][:1]:
                    world.core.on_cancel(world.now, key)
            case ("errors", which):
                self.heal()
                if which:
                    setattr(world.ranks[1], which, "told to")
            case ("assign", models):
                self.assign(models)
            case ("upgrade", model):
                self.generations[model] += 1
                self.assign({wanted.model for wanted in world.core.state.wanted})
            case ("lose",):
                world.lose_ranks()
                world.ranks_up()
        self.check()

    def assign(self, models: set[str]) -> None:
        self.world.assign(*(wanted(model, self.generations[model]) for model in sorted(models)))

    def heal(self) -> None:
        for rank in self.world.ranks:
            rank.load_error = rank.park_error = rank.wake_error = rank.grow_error = ""

    def check(self) -> None:
        state = self.world.core.state
        state.check()
        for rank in (0, 1):
            assert state.ledger.used(rank) <= CAPACITY_MIB * MIB, "the ledger holds more than there is"
            held = [self.world.ranks[rank].held(group) for group in self.world.ranks[rank].shards]
            assert sum(sum(shard.bytes.values()) for shard in held) <= CAPACITY_MIB * MIB, "a rank maps more than there is"
            standing = sum(shard.standby_bytes for shard in held)
            assert standing <= self.standby_mib * MIB, "copies take more host memory than there is"

    def end(self) -> None:
        """Everything heals, everybody is answered."""
        world = self.world
        self.heal()
        for model in MODELS:
            self.generations[model] += 2  # what failed for good is tried again
        self.assign(set(MODELS))
        world.run()
        for _ in range(12):
            world.later(31)
            self.check()
        assert set(self.keys) <= set(world.ends), "a request without an end"
        assert world.core.state.held == {}
        last = [world.submit((1, 2), max_tokens=3, model=model) for model in MODELS]
        for _ in range(20):
            world.run()
            world.later(0.5)
        assert [world.texts.get(key) for key in last] == [expected_text((1, 2), 3)] * 3, [world.ends[key] for key in last]


@settings(max_examples=60, deadline=None)
@given(story=st.lists(moves, max_size=25), standby_mib=st.sampled_from([0, WEIGHTS_MIB, 1000]))
def test_nothing_takes_more_than_there_is_and_everybody_gets_an_end(story: list[tuple], standby_mib: int) -> None:
    """Rules 3 and 4, and 5 by what the ranks refuse: a park under a sequence."""
    world = Story(standby_mib)
    for move in story:
        world.tell(move)
    world.end()
