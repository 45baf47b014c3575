from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from workers.memory.ledger import Ledger, LedgerFull

RANKS = 3
CAPACITY = 100


def test_a_reservation_is_on_all_ranks_or_on_none() -> None:
    """Rule 3: memory is reserved before it is mapped, on all ranks or none."""
    ledger = Ledger([100, 50])
    with pytest.raises(LedgerFull) as full:
        ledger.reserve(1, {0: {"weights": 60}, 1: {"weights": 40, "kv_floor": 20}})
    assert [(s.rank, s.asked_bytes, s.free_bytes) for s in full.value.shortages] == [(1, 60, 50)]
    assert ledger.used(0) == ledger.used(1) == 0
    assert ledger.owners() == set()


def test_growing_is_on_all_ranks_or_on_none() -> None:
    """Rule 3."""
    ledger = Ledger([100, 50])
    ledger.reserve(1, {0: {"weights": 10}, 1: {"weights": 10}})
    with pytest.raises(LedgerFull):
        ledger.resize(1, "kv_used", {0: 50, 1: 50})
    assert ledger.held(1, "kv_used") == {}
    ledger.resize(1, "kv_used", {0: 50, 1: 40})
    ledger.resize(1, "kv_used", {0: 20, 1: 0})
    assert (ledger.used(0), ledger.used(1)) == (30, 10)


def test_what_was_measured_is_entered_even_above_capacity_and_blocks_more() -> None:
    """Rule 3: bytes are measured, not assumed."""
    ledger = Ledger([100])
    ledger.reserve(1, {0: {"weights": 90, "kv_floor": 10}})
    ledger.record(1, 0, {"weights": 105})
    assert ledger.free(0) == -5
    with pytest.raises(LedgerFull):
        ledger.reserve(2, {0: {"weights": 1}})
    assert ledger.release(1) == {0: 105}
    ledger.reserve(2, {0: {"weights": 100}})


def test_a_line_is_reserved_once() -> None:
    ledger = Ledger([100])
    ledger.reserve(1, {0: {"weights": 10}})
    with pytest.raises(ValueError, match="resize"):
        ledger.reserve(1, {0: {"weights": 10}})
    with pytest.raises(ValueError, match="-1 bytes"):
        ledger.resize(1, "weights", {0: -1})


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=5))
def test_what_fits_together_fits_in_every_order(sizes: list[tuple[int, int]]) -> None:
    """Rule 4: the order in which models load must not change the result."""
    wanted = {owner: {0: {"weights": left}, 1: {"weights": right}} for owner, (left, right) in enumerate(sizes)}
    fits = all(sum(size[rank] for size in sizes) <= CAPACITY for rank in (0, 1))
    for order in itertools.islice(itertools.permutations(wanted), 12):
        ledger = Ledger([CAPACITY, CAPACITY])
        refused = 0
        for owner in order:
            try:
                ledger.reserve(owner, wanted[owner])
            except LedgerFull:
                refused += 1
        assert (refused == 0) == fits
        ledger.check()


class LedgerUnderUse(RuleBasedStateMachine):
    """Any sequence of load, grow, shrink, unload and failure, beside a plain model of who holds what."""

    @initialize()
    def begin(self) -> None:
        self.ledger = Ledger([CAPACITY] * RANKS)
        self.model: dict[tuple[int, int, str], int] = {}

    @rule(owner=st.integers(0, 4), ranks=st.sets(st.integers(0, RANKS - 1), min_size=1), size=st.integers(0, 70))
    def load(self, owner: int, ranks: set[int], size: int) -> None:
        if any(key[0] == owner for key in self.model):
            return
        fits = all(self.total(rank) + size + 5 <= CAPACITY for rank in ranks)
        try:
            self.ledger.reserve(owner, {rank: {"weights": size, "kv_floor": 5} for rank in ranks})
            assert fits
        except LedgerFull:
            assert not fits
            return
        for rank in ranks:
            self.model[owner, rank, "weights"] = size
            self.model[owner, rank, "kv_floor"] = 5

    @rule(owner=st.integers(0, 4), size=st.integers(0, 70))
    def grow_or_shrink(self, owner: int, size: int) -> None:
        ranks = {key[1] for key in self.model if key[0] == owner}
        now = {rank: self.model.get((owner, rank, "kv_used"), 0) for rank in ranks}
        fits = all(self.total(rank) + size - now[rank] <= CAPACITY for rank in ranks if size > now[rank])
        try:
            self.ledger.resize(owner, "kv_used", dict.fromkeys(ranks, size))
            assert fits
        except LedgerFull:
            assert not fits
            return
        for rank in ranks:
            self.model[owner, rank, "kv_used"] = size

    @rule(owner=st.integers(0, 4))
    def unload_or_fail(self, owner: int) -> None:
        freed = self.ledger.release(owner)
        gone = {key: size for key, size in self.model.items() if key[0] == owner}
        assert sum(freed.values()) == sum(gone.values())
        self.model = {key: size for key, size in self.model.items() if key[0] != owner}

    def total(self, rank: int) -> int:
        return sum(size for key, size in self.model.items() if key[1] == rank)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check()
        for rank in range(RANKS):
            assert self.ledger.used(rank) == self.total(rank) <= CAPACITY
        assert self.ledger.owners() == {key[0] for key in self.model}


TestLedgerUnderUse = LedgerUnderUse.TestCase
