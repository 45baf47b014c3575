"""A shard's memory here or standing by: weights in the arena, workspace, KV, and the copy that weights come back from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from workers.engines.torch.cuda.kv import BlockMajorKv
from workers.engines.torch.memory import TensorRegion
from workers.memory.copy_engine import CopyEngine, Transfer
from workers.memory.cuda_arena import CudaRegion
from workers.memory.pinned import PinnedPool
from workers.memory.standby import HostCopy, Standby

WAIT_S = 60.0  # for copies that are under way; a 7B model in bf16 takes 0.3


@dataclass(frozen=True)
class ParkingSpace:
    """Where the models of one GPU stand by, and what carries them there and back."""

    pinned: PinnedPool
    copies: CopyEngine


class Memory(Protocol):
    """What a shard may do with its memory. Called by the thread that enqueues its steps."""

    weights: TensorRegion
    kv: BlockMajorKv

    @property
    def workspace_bytes(self) -> int: ...
    @property
    def parked_bytes(self) -> int:
        """Held outside the arena, in host memory."""
        ...

    def close(self) -> None: ...


class FixedMemory:
    """Stays where it is: engines without a parking space."""

    def __init__(self, weights: TensorRegion, workspace: TensorRegion, kv: BlockMajorKv) -> None:
        self.weights = weights
        self.kv = kv
        self._workspace = workspace

    @property
    def workspace_bytes(self) -> int:
        return self._workspace.committed_bytes

    @property
    def parked_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self.kv.close()
        self._workspace.close()
        self.weights.close()


class ParkedMemory(FixedMemory):
    """Weights leave the GPU and come back to the same addresses; workspace and KV are given up and taken anew."""

    def __init__(
        self, weights: TensorRegion, workspace: TensorRegion, kv: BlockMajorKv, layer_ends: list[int], space: ParkingSpace
    ) -> None:
        super().__init__(weights, workspace, kv)
        region = weights.region
        assert isinstance(region, CudaRegion)
        self._space = space
        self._workspace_used_bytes = workspace.used_bytes
        self._standby = Standby(region, weights.used_bytes, [*layer_ends, weights.used_bytes], space.copies)
        self._wake: Transfer | None = None
        self.awake_bytes: dict[str, int] = {}  # by kind, beside KV: what the last park gave back

    @property
    def parked_bytes(self) -> int:
        return sum(copy.size_bytes for copy in self._standby.copies)

    @property
    def is_parked(self) -> bool:
        return self._standby.state == "parked"

    @property
    def wake_under_way(self) -> Transfer | None:
        """Marks 0.. are layers of the stage, the last one is everything."""
        if self._wake is not None and self._wake.over:
            self._wake = None
        return self._wake

    def save(self) -> Transfer | None:
        """Begin a host copy unless there is one: parking costs nothing once it is complete. MemoryError without host memory."""
        if self._standby.copies:
            return None
        return self._standby.save(HostCopy(self._space.pinned, self._standby.size_bytes))

    def drop_copies(self) -> None:
        """Where the weights are in memory, that is enough."""
        if not self.is_parked and self.wake_under_way is None:
            for copy in list(self._standby.copies):
                self._standby.drop(copy, WAIT_S)

    def park(self) -> None:
        """The work that used any of it is over."""
        saving = self.save()
        if saving is not None:
            saving.wait(WAIT_S)
        for copy in self._standby.copies:
            copy.settle(WAIT_S)
        taken = {"weights": self.weights.committed_bytes, "workspace": self.workspace_bytes}
        self._standby.park()
        self.awake_bytes = taken
        self.kv.grow(0)
        self._workspace.region.commit(0)

    def wake(self, blocks: int) -> Transfer:
        """Take memory, with `blocks` KV blocks, and begin to copy. MemoryError changes nothing."""
        self._workspace.region.commit(self._workspace_used_bytes)
        try:
            self.kv.grow(blocks)
            self._wake = self._standby.wake()
        except BaseException:
            self.give_up_wake()
            raise
        return self._wake

    def give_up_wake(self) -> None:
        """The weights do not come: what was taken beside them goes back."""
        self.kv.grow(0)
        self._workspace.region.commit(0)

    def wait(self, mark: int, stream: torch.cuda.Stream) -> None:
        """Let `stream` go on when mark `mark` of a wake under way has arrived."""
        if self._wake is not None:
            self._wake.wait_mark(mark, stream, WAIT_S)

    def close(self) -> None:
        if self._wake is not None:
            self._wake.wait(WAIT_S)
        for copy in list(self._standby.copies):
            copy.settle(WAIT_S)
            copy.close()
        self._standby.copies.clear()
        super().close()
