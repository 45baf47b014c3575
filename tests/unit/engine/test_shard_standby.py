"""A CPU shard parks and wakes: its pages go, its addresses stay, nothing is read or converted again."""

from __future__ import annotations

import pytest
from shard_runner import Runner, answer, load

from workers.engines.base import ParkableShard
from workers.memory.arena import HostArena

PROMPT = [5, 9, 33, 7, 80]
WAIT_S = 10.0


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_woken_shard_answers_as_before_and_reads_nothing(precision: str, checkpoints, cache) -> None:
    """Rule 3: freed bytes are measured; and a wake is no load."""
    arena = HostArena(2**30)
    shard = load(checkpoints("llama"), cache, arena, precision=precision, floor_blocks=16)
    assert isinstance(shard, ParkableShard)
    before, held, committed = answer(shard, PROMPT, 12), shard.held(), arena.committed_bytes
    address = next(iter(shard._stage.model.parameters())).data_ptr()
    shard.step(_release(shard))
    shard.save()
    assert arena.committed_bytes == committed, "a copy takes nothing of the pool"
    shard.park()
    parked = shard.held()
    assert arena.committed_bytes == 0
    assert parked.parked
    assert sum(parked.bytes.values()) == 0
    assert parked.standby_bytes == parked.wake_bytes["weights"] == held.bytes["weights"]
    shard.wake(16).wait(WAIT_S)
    woken = shard.held()
    assert (woken.bytes, woken.disk_bytes, woken.standby_bytes) == (held.bytes, held.disk_bytes, 0)
    assert arena.committed_bytes == committed
    assert next(iter(shard._stage.model.parameters())).data_ptr() == address
    assert [token.token for token in answer(shard, PROMPT, 12)] == [token.token for token in before]
    shard.close()
    assert arena.committed_bytes == 0


def test_a_shard_with_sequences_does_not_park(checkpoints, cache) -> None:
    """Rule 5: memory is never pulled from under requests."""
    shard = load(checkpoints("llama"), cache)
    runner = Runner(shard)
    runner.add(PROMPT, 4)
    runner.step()
    with pytest.raises(ValueError, match="1 sequences"):
        shard.park()
    assert len(runner.finish()[1]) == 4


def test_a_wake_without_room_leaves_it_parked(checkpoints, cache) -> None:
    """Rule 3: a failed step gives everything back."""
    arena = HostArena(2**30)
    shard = load(checkpoints("llama"), cache, arena, floor_blocks=16)
    taken = arena.committed_bytes
    shard.park()
    other = arena.reserve("other", 2**30)
    other.commit(2**30 - taken + 2**21)
    with pytest.raises(MemoryError):
        shard.wake(16)
    assert arena.committed_bytes == other.committed_bytes
    other.commit(0)
    shard.wake(16).wait(WAIT_S)
    assert len(answer(shard, PROMPT, 3)) == 3


def _release(shard):
    from workers.messages import Step

    return Step(99, 1, (), tuple(shard._sequences._sequences))
