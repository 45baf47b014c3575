"""What the ranks of one worker group say to each other. Implementations: `single` (one rank), `mpi` (CPU), `nccl` (GPU)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch


class GroupComm(Protocol):
    """One rank's end of a worker group of `tensor_parallel` × `pipeline_parallel` ranks.

    All calls are made by the rank's one compute thread, in the order of the driver's steps, so that every member makes
    the same calls in the same order. A peer that is gone ends the process: the group restarts as one (rule 11).
    """

    tensor_rank: int
    tensor_size: int
    stage: int
    stages: int
    taken_bytes: int  # memory of the device that `connect` took

    def connect(self) -> None:
        """Meet the other members, which do the same. Called first, once, by the thread that loads; gives the GPU no work."""
        ...

    def quiet(self) -> AbstractContextManager[None]:
        """Within it exchanges do nothing: kernels can be set up without the peers, beside steps of other groups."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the tensor-parallel shards of this stage, in place. Shape and dtype as given; contiguous."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[..., n] on each shard to [..., n * tensor_size], concatenated along the last axis in shard order."""
        ...

    def send_next(self, tensor: torch.Tensor) -> None:
        """To the same shard of the next stage. Returns when the tensor may be reused."""
        ...

    def recv_previous(self, tensor: torch.Tensor) -> torch.Tensor:
        """Into `tensor`, from the same shard of the previous stage."""
        ...

    def close(self) -> None: ...
