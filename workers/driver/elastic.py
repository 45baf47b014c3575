"""KV memory that comes and goes: every group keeps its floor, the rest belongs to whom it helps now.

Pure decisions. A group grows by chunks, ahead of need, after the ledger has taken the bytes on all its ranks; it gives back
what it has not needed for a while, at once when another is short. A load goes before growth: what groups hold above their
floors is taken back for it, by preemption if need be.
"""

from __future__ import annotations

from collections.abc import Iterable

from workers.driver.effects import Effects
from workers.driver.group import Group, Op
from workers.driver.pool_state import PoolState
from workers.memory.ledger import LedgerFull, Shortage
from workers.messages import GrowKv

GIVE_BACK_AFTER_S = 10.0
DENIED_PAUSE_S = 0.25  # before a group that was denied asks again


class ElasticKv:
    def __init__(self, state: PoolState, effects: Effects) -> None:
        self._state = state
        self._effects = effects

    def give_back(self) -> None:
        """Before steps are sent, while what is called back is not in use again."""
        for group in self._free():
            if group.reclaim_to is not None:
                self._give_back(group)

    def grow(self, now: float) -> None:
        """After steps were planned, when it is known what they lacked."""
        for group in self._free():
            if group.reclaim_to is None:
                self._grow_if_short(now, group)

    def give_back_idle(self, now: float) -> None:
        """Now and then."""
        for group in self._free():
            if group.reclaim_to is None:
                self._give_back_if_idle(now, group)

    def come_down(self) -> None:
        """Where more was measured than reserved, KV above the floors goes until it fits, from who has most of it."""
        for rank in range(self._state.ledger.ranks):
            missing = -self._state.ledger.free(rank)
            donors = [group for group in self._donors() if rank in group.ranks]
            for group in sorted(donors, key=lambda group: -_above_floor(group, rank)):
                if missing <= 0:
                    break
                assert group.sizing is not None
                lacking = -(-(missing + group.sizing.page_bytes) // group.sizing.block_bytes[rank])  # whole pages go
                target = max(group.sizing.floor_blocks, group.kv_blocks - lacking)
                group.reclaim_to = target if group.reclaim_to is None else min(target, group.reclaim_to)
                missing -= (group.kv_blocks - group.reclaim_to) * group.sizing.block_bytes[rank]

    def reclaim_for_load(self, shortages: Iterable[Shortage], *, used: bool) -> bool:
        """Ask groups to come down so that the shortages end, to what they use or, with `used`, to their floors; False when all
        of it would not suffice."""
        asked: dict[Group, int] = {}
        for shortage in shortages:
            missing = shortage.asked_bytes - shortage.free_bytes
            donors = [group for group in self._donors() if shortage.rank in group.ranks]
            spare = {group: _spare(group, shortage.rank, used=used) for group in donors}
            for group in sorted(donors, key=lambda group: -spare[group]):
                if missing <= 0:
                    break
                missing -= spare[group]
                asked[group] = group.sizing.floor_blocks if used and group.sizing else _needed(group)
            if missing > 0:
                return False
        for group, blocks in asked.items():
            group.reclaim_to = blocks
        return True

    def on_done(self, now: float, group: Group, op: Op) -> None:
        """All ranks reported. What did not grow everywhere shrinks back everywhere (rule 3)."""
        assert group.sizing is not None
        assert group.batcher is not None
        if op.errors:
            text = "; ".join(f"rank {rank}: {error}" for rank, error in sorted(op.errors.items()))
            self._effects.event("kv_failed", group.model, f"group {group.id} could not map {op.blocks} KV blocks: {text}")
            group.grow_denied_at = now
            if op.blocks > group.kv_blocks:
                self._send(group, group.kv_blocks)
            return
        if op.blocks > group.kv_blocks:
            more = sum(group.sizing.block_bytes.values()) * (op.blocks - group.kv_blocks)
            self._state.switched("remap", now - op.began_at, more)
        group.kv_blocks = op.blocks
        self._state.ledger.resize(group.id, "kv_used", group.sizing.kv_used_bytes(op.blocks))
        if op.blocks > group.batcher.blocks.capacity:
            group.batcher.blocks.grow(op.blocks)

    # ------------------------------------------------------------------ growing

    def _grow_if_short(self, now: float, group: Group) -> None:
        assert group.sizing is not None
        assert group.batcher is not None
        batcher = group.batcher
        short = batcher.short_blocks
        low = batcher.blocks.available < min(len(batcher.running), batcher.concurrency) and batcher.busy
        if not (short or low) or group.kv_blocks >= group.sizing.ceiling_blocks:
            return
        if group.grow_denied_at is not None and now - group.grow_denied_at < DENIED_PAUSE_S:
            return
        if any(other.reclaiming and set(other.ranks) & set(group.ranks) for other in self._state.groups.values()):
            return  # a load goes first
        shortages: tuple[Shortage, ...] = ()
        chunk = group.sizing.chunk_blocks
        for more in dict.fromkeys((max(batcher.wanted_blocks, short, chunk), max(short, chunk), max(short, 1))):
            blocks = min(group.kv_blocks + more, group.sizing.ceiling_blocks)
            try:
                self._state.ledger.resize(group.id, "kv_used", group.sizing.kv_used_bytes(blocks))
            except LedgerFull as full:
                shortages = full.shortages
                continue
            group.grow_denied_at, group.starving = None, ()
            self._send(group, blocks).began_at = now
            return
        group.grow_denied_at = now
        group.starving = () if self._ask_donors(group, shortages) else shortages

    def _ask_donors(self, group: Group, shortages: Iterable[Shortage]) -> bool:
        """First what nobody uses; then, between groups that all want more, from who has more above its floor."""
        assert group.sizing is not None
        found = False
        for shortage in shortages:
            donors = [donor for donor in self._donors() if donor is not group and shortage.rank in donor.ranks]
            unused = [(donor, _needed(donor)) for donor in donors if donor.kv_blocks - _needed(donor) > 0]
            if unused:
                for donor, blocks in unused:
                    donor.reclaim_to = blocks
                found = True
                continue
            donors = [donor for donor in donors if donor.spec.priority <= group.spec.priority]
            richest = max(donors, key=lambda donor: _above_floor(donor, shortage.rank), default=None)
            if richest is None or richest.sizing is None:
                continue
            margin = 2 * group.sizing.chunk_blocks * group.sizing.block_bytes[shortage.rank]
            if _above_floor(richest, shortage.rank) > _above_floor(group, shortage.rank) + margin:
                richest.reclaim_to = max(richest.sizing.floor_blocks, richest.kv_blocks - richest.sizing.chunk_blocks)
                found = True
        return found

    # ------------------------------------------------------------------ giving back

    def _give_back(self, group: Group) -> None:
        assert group.batcher is not None
        assert group.reclaim_to is not None
        target = group.reclaim_to
        if target >= group.kv_blocks:
            group.reclaim_to = None
            return
        if not group.batcher.blocks.shrink(target):
            group.batcher.preempt_above(target)
            if not group.batcher.blocks.shrink(target):
                return  # steps in flight still use them; the end of those brings us here again
        group.reclaim_to = None
        self._send(group, target)

    def _give_back_if_idle(self, now: float, group: Group) -> None:
        needed = _needed(group)
        if needed == group.kv_blocks:
            group.idle_since = None
            return
        if group.idle_since is None:
            group.idle_since = now
        elif now - group.idle_since >= GIVE_BACK_AFTER_S:
            group.idle_since = None
            group.reclaim_to = needed
            self._give_back(group)

    def _free(self) -> list[Group]:
        """Loaded groups whose memory is not changing; one operation a group at a time."""
        return [
            group
            for group in self._state.groups.values()
            if group.batcher is not None and group.op is None and group.state in ("checking", "ready", "draining", "parking")
        ]

    def _donors(self) -> list[Group]:
        return [
            group
            for group in self._state.groups.values()
            if group.batcher is not None
            and group.sizing is not None
            and group.kv_blocks > group.sizing.floor_blocks
            and group.state in ("ready", "draining", "checking", "parking")
        ]

    def _send(self, group: Group, blocks: int) -> Op:
        op = Op(self._state.new_op_id(), "kv", group.id, set(group.ranks), blocks)
        group.op = self._state.ops[op.id] = op
        for rank in group.ranks:
            self._effects.send(rank, GrowKv(op=op.id, group_id=group.id, blocks=blocks))
        return op


def _needed(group: Group) -> int:
    """Blocks, in chunks above the floor, that hold all blocks in use. Cached prefixes beyond them go where others need memory."""
    assert group.sizing is not None
    assert group.batcher is not None
    floor, chunk = group.sizing.floor_blocks, group.sizing.chunk_blocks
    used = group.batcher.blocks.highest_used() + 1
    return min(group.kv_blocks, floor + max(0, -(-(used - floor) // chunk)) * chunk)


def _spare(group: Group, rank: int, *, used: bool) -> int:
    """Bytes on the rank that it can give up: what nobody uses, or all above its floor."""
    assert group.sizing is not None
    above = _above_floor(group, rank)
    return above if used else above - group.sizing.kv_used_bytes(_needed(group))[rank]


def _above_floor(group: Group, rank: int) -> int:
    """Bytes that giving back down to the floor frees on the rank."""
    assert group.sizing is not None
    return group.sizing.kv_used_bytes(group.kv_blocks)[rank]
