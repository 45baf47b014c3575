"""The contract between a rank worker and what computes in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from workers.comm.base import GroupComm
from workers.memory.arena import Arena
from workers.messages import HeldShard, LoadShard, Step, StepDone

ProgressFn = Callable[[float, str], None]
"""(fraction 0..1, what is being done)"""


class Shard(Protocol):
    """One rank's part of one worker group, ready to compute. Used by one thread at a time."""

    def held(self) -> HeldShard:
        """What it holds now; bytes as measured, not as planned (rule 3)."""
        ...

    def step(self, step: Step) -> StepDone | None:
        """Compute one step. The last stage's first shard returns what was sampled, every other rank None."""
        ...

    def grow_kv(self, blocks: int) -> None:
        """Make KV blocks 0..blocks-1 usable, and give memory beyond them back. MemoryError changes nothing."""
        ...

    def close(self) -> None:
        """Give all memory back to the arena."""
        ...


class Engine(Protocol):
    def load(self, command: LoadShard, rank: int, arena: Arena, comm: GroupComm, progress: ProgressFn) -> Shard:
        """Bring a shard into memory, beside the steps of others. Any exception leaves nothing behind in the arena.

        YardError names the model, the cause and the next step; MemoryError when the budget does not suffice.
        """
        ...
