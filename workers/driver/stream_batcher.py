"""The queue in front of an engine that schedules itself: it never has more than `limits.concurrency` requests."""

from __future__ import annotations

from bisect import insort

from workers.driver.batching import Batcher, StepPlan
from workers.driver.sequence import Sequence
from workers.memory.blocks import BlockPool


class StreamBatcher(Batcher):
    """Plans no steps. Its KV blocks are the engine's affair, fixed in number, and only counted here."""

    def __init__(self, kv_blocks: int, block_tokens: int, batch_tokens: int, concurrency: int) -> None:
        super().__init__(BlockPool(kv_blocks, prefix_cache=False), block_tokens, batch_tokens, concurrency, stages=1)
        self._ending: set[int] = set()  # cancelled, and still in the engine

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting or self._ending)

    def plan(self) -> StepPlan | None:
        return None

    def admit(self) -> list[Sequence]:
        """Who goes to the engine now, in order."""
        admitted = []
        while self.waiting and len(self.running) + len(self._ending) < self.concurrency:
            sequence = self.waiting.pop(0)
            sequence.known_to_ranks = sequence.admitted_before = True
            self.shares.begin(sequence)
            insort(self.running, sequence, key=lambda running: running.rank_order)
            admitted.append(sequence)
        return admitted

    def remove(self, sequence: Sequence) -> None:
        if sequence.known_to_ranks:
            self._ending.add(sequence.id)
        super().remove(sequence)

    def cancels(self) -> list[int]:
        """Sequences that the engine is to give up."""
        released, self.released = self.released, []
        return released

    def ended(self, sequence: int) -> None:
        """The engine has done with it."""
        self._ending.discard(sequence)

    def find(self, sequence: int) -> Sequence | None:
        return next((running for running in self.running if running.id == sequence), None)

    def check(self) -> None:
        assert not self.blocks.used, "a group that its engine schedules uses blocks"
        assert all(sequence.known_to_ranks for sequence in self.running)
        assert not any(sequence.known_to_ranks for sequence in self.waiting)
