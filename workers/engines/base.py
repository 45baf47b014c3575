"""The contract between a rank worker and what computes in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from workers.comm.base import GroupComm
from workers.memory.arena import Arena
from workers.messages import HeldShard, LoadShard, Step, StepDone


class ProgressFn(Protocol):
    def __call__(self, fraction: float, what: str, note: str = "", /) -> None:
        """`fraction`: 0 to 1; `what` is being done; `note`: something that operators want to read later, too."""
        ...


class DamagedModelError(ArithmeticError):
    """A model's logits are no numbers: its weights are damaged, or overflow. Raised after everything that a group's ranks do
    together in a step, so all of them are ready for the next command.
    """


class Shard(Protocol):
    """One rank's part of one worker group, ready to compute. Used by one thread at a time."""

    def held(self) -> HeldShard:
        """What it holds now; bytes as measured, not as planned (rule 3)."""
        ...

    def step(self, step: Step) -> StepDone | None:
        """Compute one step. The last stage's first shard returns what was sampled, every other rank None.

        DamagedModelError fails the worker group; any other error its step, or the process where peers wait for this rank.
        """
        ...

    def grow_kv(self, blocks: int) -> None:
        """Make KV blocks 0..blocks-1 usable, and give memory beyond them back. MemoryError changes nothing."""
        ...

    def close(self) -> None:
        """Give all memory back to the arena."""
        ...


class PendingStep(Protocol):
    def result(self) -> StepDone:
        """Waits for the device. Called once, by another thread than the one that enqueues. An error is the end of the process."""
        ...


@runtime_checkable
class EnqueuingShard(Shard, Protocol):
    """A shard on a device of its own: the next step can be given to it while it computes one."""

    def begin(self, step: Step) -> PendingStep | None:
        """As `step`, but returns once the step is enqueued."""
        ...


class Waking(Protocol):
    """Weights on their way back."""

    def wait(self, timeout_s: float) -> None:
        """Return once all of it has arrived. Raises what made it fail, or TimeoutError."""
        ...


@runtime_checkable
class ParkableShard(Shard, Protocol):
    """A shard whose weights can stand by outside the pool's memory, and come back to the same addresses."""

    def save(self) -> None:
        """Have, or begin, the copy that `park` needs, on any thread and beside steps: weights do not change. MemoryError when
        there is no place for it; nothing is left behind then."""
        ...

    def drop_copy(self) -> None:
        """Give the copy of weights that are in memory up, in order with the steps. Without one, or away: nothing."""
        ...

    def park(self) -> None:
        """Give weights, KV and workspace back, in order with the steps. ValueError while sequences are known (rule 5)."""
        ...

    def wake(self, blocks: int) -> Waking:
        """Take memory, with KV blocks 0..blocks-1, and begin the copy back. MemoryError changes nothing."""
        ...


@runtime_checkable
class ConstrainedShard(Shard, Protocol):
    """A shard that samples, and can hold answers to a schema."""

    def constrain(self, sequence: int, json_schema: str) -> Callable[[], int]:
        """What compiles it, beside steps and on one other thread; the sequence may begin when it has ended. It gives the host
        memory that the shard has for schemas now, in bytes of the pool's ledger. ValueError: the schema cannot be used."""
        ...

    def forget_constraint(self, sequence: int | None) -> None:
        """A sequence does not begin; None: none does of those that were asked for."""
        ...


class Engine(Protocol):
    def load(self, command: LoadShard, rank: int, arena: Arena, comm: GroupComm, progress: ProgressFn) -> Shard:
        """Bring a shard into memory, beside the steps of others. Any exception leaves nothing behind in the arena.

        YardError names the model, the cause and the next step; MemoryError when the budget does not suffice.
        """
        ...
