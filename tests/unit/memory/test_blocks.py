from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from workers.memory.blocks import ROOT, BlockPool

SIZE = 4


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Compute a sequence: take its known prefix, allocate the rest, register its full blocks."""
    known = pool.match(tokens, SIZE)
    pool.take(block for block, _ in known)
    fresh = pool.allocate(-(-len(tokens) // SIZE) - len(known))
    assert fresh is not None
    blocks = [block for block, _ in known] + fresh
    previous = ROOT
    for index in range(len(tokens) // SIZE):
        previous = pool.register(blocks[index], previous, tokens[index * SIZE : (index + 1) * SIZE])
    return blocks


def test_a_prefix_is_found_again_while_used_and_after() -> None:
    pool = BlockPool(8)
    first = fill(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert [block for block, _ in pool.match([1, 2, 3, 4, 5, 6, 7, 8, 10], SIZE)] == first[:2]
    second = fill(pool, [1, 2, 3, 4, 9, 9, 9, 9])
    assert second[0] == first[0]
    pool.release(first)
    pool.release(second)
    assert pool.used == 0
    assert pool.available == 8
    assert [block for block, _ in pool.match([1, 2, 3, 4, 5, 6, 7, 8], SIZE)] == first[:2]
    pool.check()


def test_the_same_block_after_another_prefix_is_not_the_same() -> None:
    pool = BlockPool(8)
    fill(pool, [1, 1, 1, 1, 5, 6, 7, 8])
    assert pool.match([2, 2, 2, 2, 5, 6, 7, 8], SIZE) == []
    assert pool.match([5, 6, 7, 8], SIZE) == []


def test_the_least_recently_used_prefix_is_evicted_from_its_end() -> None:
    pool = BlockPool(4)
    pool.release(fill(pool, [1] * 8))
    pool.release(fill(pool, [2] * 8))
    taken = pool.allocate(1)
    assert taken is not None
    assert len(pool.match([1] * 8, SIZE)) == 1
    assert len(pool.match([2] * 8, SIZE)) == 2
    pool.check()


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.available == 3
    assert pool.allocate(3) == [0, 1, 2]


def test_shrinking_drops_cached_blocks_and_waits_for_used_ones() -> None:
    pool = BlockPool(8)
    used = fill(pool, [1] * 8)
    cached = fill(pool, [2] * 8)
    high = pool.allocate(2)
    assert high == [4, 5]
    pool.release(cached)
    assert not pool.shrink(3)
    pool.check()
    pool.release(high)
    assert pool.shrink(3)
    assert [block for block, _ in pool.match([2] * 8, SIZE)] == [2]
    assert used == [0, 1]
    pool.grow(6)
    assert pool.available == 4
    pool.check()


def test_without_prefix_cache_nothing_is_found() -> None:
    pool = BlockPool(4, prefix_cache=False)
    pool.release(fill(pool, [1] * 8))
    assert pool.match([1] * 8, SIZE) == []


class BlocksUnderUse(RuleBasedStateMachine):
    """Any order of computing, ending, growing and shrinking loses no block and never hands one out twice."""

    @initialize()
    def begin(self) -> None:
        self.pool = BlockPool(12)
        self.sequences: list[tuple[list[int], list[int]]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def compute(self, tokens: list[int]) -> None:
        if self.pool.available < -(-len(tokens) // SIZE):
            return
        blocks = fill(self.pool, tokens)
        for other, held in self.sequences:
            for index, block in enumerate(blocks):
                if block in held:
                    same = (index + 1) * SIZE
                    assert held[index] == block
                    assert other[:same] == tokens[:same], "a block shared by different contents"
        self.sequences.append((tokens, blocks))

    @rule(index=st.integers(0, 10))
    def end(self, index: int) -> None:
        if self.sequences:
            _, blocks = self.sequences.pop(index % len(self.sequences))
            self.pool.release(blocks)

    @rule(capacity=st.integers(0, 20))
    def resize(self, capacity: int) -> None:
        if capacity >= self.pool.capacity:
            self.pool.grow(capacity)
        else:
            clean = self.pool.shrink(capacity)
            assert clean == all(block < capacity for _, blocks in self.sequences for block in blocks)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.used == len({block for _, blocks in self.sequences for block in blocks})


TestBlocksUnderUse = BlocksUnderUse.TestCase
