"""Which sequences of one worker group compute which tokens in the next step: in-flight batching with chunked prefill.

Pure. The decision tree of `plan`, in this order, within `batch_tokens` tokens and `concurrency` sequences:

1. A sequence with one token to compute (a decode) computes it. One that gets no KV block for it takes the blocks of the
   sequence that is last in order (lowest priority, then newest), which is preempted: it waits again and is recomputed, its
   generated tokens kept. When that is itself, it keeps what it has and sits this step out.
2. Running sequences with more to compute (prefill) get chunks of what is left of the budget.
3. Waiting sequences are admitted in order, as long as blocks for all their known tokens are there; blocks of a known prefix
   are taken from the cache. The first that does not fit stops the admission, so that a long prompt is not passed for ever.
   Those that their ranks still compile something for (`unprepared`) are passed.

A pipeline group has one step in flight a stage, of disjoint sequences; a step takes its share of them.

Where steps may be planned ahead, a sequence in a step that is being computed can be in the next one too: the token which the
first will sample is left to the rank, which knows it before we do. Sequences that end with such a token are computed once too
often. Nobody who is being computed can be preempted, so a group that is short of blocks must not be planned ahead. Answers that
follow a schema are never planned ahead: which tokens may follow is known when the last one is.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from workers.driver.sequence import Sequence
from workers.driver.tenant_shares import TenantShares
from workers.memory.blocks import ROOT, BlockPool
from workers.memory.kv_layout import blocks_for_tokens
from workers.messages import SampledToken, SequenceStep, StepDone

ORDER_EVERY_S = 0.1


@dataclass(frozen=True)
class StepPlan:
    sequences: tuple[SequenceStep, ...]
    members: tuple[Sequence, ...]
    tokens: int


class Batcher:
    """Queues and KV blocks of one worker group."""

    def __init__(
        self, blocks: BlockPool, block_tokens: int, batch_tokens: int, concurrency: int, stages: int, ahead: int = 0
    ) -> None:
        """`ahead`: steps that may be planned before the one being computed is done, with one stage only."""
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.batch_tokens = batch_tokens
        self.concurrency = concurrency
        self.stages = stages
        self.ahead = ahead
        self.shares = TenantShares()
        self._came, self._ordered_at = False, 0.0
        self.waiting: list[Sequence] = []  # in order
        self.unprepared: list[Sequence] = []  # those of them whose schemas the ranks are to be asked to compile
        self.running: list[Sequence] = []  # in order
        self.leaving: set[Sequence] = set()  # ended, and still in a step that is being computed
        self.released: list[int] = []  # sequences that the ranks must forget
        self.short_blocks = 0  # blocks that the last plan lacked for who was next
        self.wanted_blocks = 0  # and for all whom it would have admitted
        self.preemptions = 0

    @property
    def outstanding_tokens(self) -> int:
        return sum(sequence.outstanding_tokens for sequence in (*self.running, *self.waiting))

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        if sequence.tag is None:
            sequence.cost = sequence.outstanding_tokens
            self.shares.enter(sequence)
        self._came = True
        if sequence.constrained:
            sequence.prepared = False
            self.unprepared.append(sequence)
        insort(self.waiting, sequence, key=lambda waiting: waiting.rank_order)

    def remove(self, sequence: Sequence) -> None:
        """It ended. What a step in flight still computes of it is dropped when that step is done."""
        sequence.ended = True
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            if not sequence.admitted_before:
                self.shares.leave(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
            if sequence.in_flight:
                self.leaving.add(sequence)
            else:
                self._release(sequence)

    def order(self, now: float) -> None:
        """Who waits first, by now. Of many that wait it changes slowly, so not before every step."""
        if self._came or now - self._ordered_at >= ORDER_EVERY_S:
            self.shares.order(self.waiting, now)
            self._came, self._ordered_at = False, now

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed now."""
        self.short_blocks = self.wanted_blocks = 0
        idle = [sequence for sequence in self.running if not sequence.in_flight or (self.ahead and sequence.may_be_ahead)]
        share = -(-min(len(self.running) + len(self.waiting), self.concurrency) // self.stages)
        budget = self.batch_tokens
        chosen: dict[Sequence, int] = {}
        # 1. Decodes. Who was preempted for an earlier one has no blocks any more.
        for sequence in [sequence for sequence in idle if sequence.uncomputed == 1]:
            if budget == 0 or len(chosen) == share:
                break
            if sequence.blocks and self._make_room(sequence, 1, chosen):
                chosen[sequence] = 1
                budget -= 1
        # 2. Prefill under way
        for sequence in [sequence for sequence in idle if sequence.uncomputed > 1]:
            if budget == 0 or len(chosen) == share:
                break
            count = min(sequence.uncomputed, budget)
            if sequence.blocks and self._make_room(sequence, count, chosen):
                chosen[sequence] = count
                budget -= count
        # 3. Admission
        while budget and len(chosen) < share and len(self.running) < self.concurrency:
            sequence = next((waiting for waiting in self.waiting if waiting.prepared), None)
            if sequence is None:
                break
            if not self._admit(sequence):
                self.wanted_blocks = self._lacking(budget)
                break
            count = min(sequence.uncomputed, budget)
            chosen[sequence] = count
            budget -= count
        if not chosen:
            return None
        steps = tuple(self._step_of(sequence, count) for sequence, count in chosen.items())
        return StepPlan(steps, tuple(chosen), self.batch_tokens - budget)

    def finish(self, plan: StepPlan, done: StepDone) -> list[tuple[Sequence, SampledToken]]:
        """Account for a computed step; the sampled tokens of those that have not ended. They are appended here."""
        sampled = {token.sequence: token for token in done.sampled}
        results = []
        for step, sequence in zip(plan.sequences, plan.members, strict=True):
            count = max(len(step.tokens), 1)
            sequence.in_flight -= count
            sequence.coming -= step.sample
            if sequence.ended:
                if not sequence.in_flight:
                    self.leaving.discard(sequence)
                    self._release(sequence)
                continue
            sequence.computed += count
            self._register(sequence)
            if step.sample and sequence.id in sampled:
                token = sampled[sequence.id]
                sequence.tokens.append(token.token)
                results.append((sequence, token))
        return results

    def preempt_above(self, block_limit: int) -> None:
        """Preempt every sequence that uses a block from `block_limit` on and is not being computed."""
        for sequence in [s for s in self.running if not s.in_flight and any(block >= block_limit for block in s.blocks)]:
            self._preempt(sequence)

    def check(self) -> None:
        """AssertionError when blocks and sequences disagree."""
        self.blocks.check()
        held: set[int] = set()
        for sequence in (*self.running, *self.leaving):
            held.update(sequence.blocks)
            assert len(sequence.blocks) * self.block_tokens >= sequence.computed, "computed tokens without a block"
        assert all(not sequence.blocks for sequence in self.waiting), "a waiting sequence holds blocks"
        assert self.blocks.used == len(held), f"{self.blocks.used} blocks used, {len(held)} held by sequences"

    # ------------------------------------------------------------------ parts of the plan

    def _make_room(self, sequence: Sequence, count: int, chosen: dict[Sequence, int]) -> bool:
        """Blocks for `count` more tokens, preempting who is last in order; False when `sequence` itself had to give way."""
        while True:
            end = sequence.computed + sequence.in_flight + count
            missing = blocks_for_tokens(end, self.block_tokens) - len(sequence.blocks)
            if missing <= 0:
                return True
            got = self.blocks.allocate(missing)
            if got is not None:
                sequence.blocks.extend(got)
                return True
            self.short_blocks = max(self.short_blocks, missing)
            victims = [other for other in self.running if not other.in_flight and other not in chosen]
            victim = max(victims, key=lambda other: other.rank_order, default=sequence)
            if victim.rank_order <= sequence.rank_order:
                return False
            self._preempt(victim)

    def _admit(self, sequence: Sequence) -> bool:
        known = self.blocks.match(sequence.tokens[: len(sequence.tokens) - 1], self.block_tokens)
        self.blocks.take(block for block, _ in known)
        needed = blocks_for_tokens(len(sequence.tokens), self.block_tokens) - len(known)
        fresh = self.blocks.allocate(needed)
        if fresh is None:
            self.short_blocks = max(self.short_blocks, needed - self.blocks.available)
            self.blocks.release([block for block, _ in known])
            return False
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=lambda running: running.rank_order)
        sequence.blocks = [block for block, _ in known] + fresh
        sequence.hashes = [digest for _, digest in known]
        sequence.computed = len(known) * self.block_tokens
        sequence.sent_blocks = 0
        if not sequence.admitted_before:
            sequence.cached_tokens = sequence.computed
            sequence.admitted_before = True
            self.shares.begin(sequence)
        return True

    def _lacking(self, budget: int) -> int:
        """Blocks that are missing to admit, in order, all whom the rest of a step has room for."""
        needed = 0
        for sequence in self.waiting[: self.concurrency - len(self.running)]:
            if budget <= 0:
                break
            needed += blocks_for_tokens(len(sequence.tokens), self.block_tokens)
            budget -= len(sequence.tokens)
        return needed - self.blocks.available

    def _step_of(self, sequence: Sequence, count: int) -> SequenceStep:
        start = sequence.computed + sequence.in_flight
        new = None if sequence.known_to_ranks else sequence.introduction()
        step = SequenceStep(
            sequence=sequence.id,
            tokens=tuple(sequence.tokens[start : start + count]),
            start=start,
            new_blocks=tuple(sequence.blocks[sequence.sent_blocks :]),
            sample=start + count == len(sequence.tokens) + sequence.coming,
            new=new,
        )
        sequence.sent_blocks = len(sequence.blocks)
        sequence.known_to_ranks = True
        sequence.in_flight += count
        sequence.coming += step.sample
        return step

    def _register(self, sequence: Sequence) -> None:
        """Full blocks become prefixes that others may take up."""
        size = self.block_tokens
        for index in range(len(sequence.hashes), sequence.computed // size):
            previous = sequence.hashes[index - 1] if index else ROOT
            content = sequence.tokens[index * size : (index + 1) * size]
            sequence.hashes.append(self.blocks.register(sequence.blocks[index], previous, content))

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.preemptions += 1
        self.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Give back blocks and what the ranks know. A sequence may come back later and is introduced again."""
        self.blocks.release(sequence.blocks)
        if sequence.known_to_ranks:
            self.released.append(sequence.id)
        sequence.blocks = []
        sequence.hashes = []
        sequence.computed = 0
        sequence.sent_blocks = 0
        sequence.known_to_ranks = False
