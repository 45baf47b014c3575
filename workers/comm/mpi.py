"""Worker groups between CPU ranks: MPI on numpy views of torch tensors.

The ranks of a pool are one MPI world. A group's communicators are made at its first exchange, by its members only
(`Comm.Create_group`), because that call happens in the order of the steps on every rank; so loading a group, which runs
beside the steps of others, makes no MPI call. All calls come from the rank's one compute thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import mpi4py
import numpy as np
import torch

from workers.comm.base import GroupComm
from workers.comm.single import SingleComm

# One thread at a time, not always the one that initialised MPI. Must be set before the first import of mpi4py.MPI.
mpi4py.rc.thread_level = "serialized"

_HIDDEN_TAG = 1
_POLL_S = 3e-5  # A stage waits milliseconds for the one before it; MPI's own busy wait would take its core away.
_SPINS = 20


def make_group_comm(ranks: Sequence[int], tensor_parallel: int, pipeline_parallel: int, group_id: int) -> GroupComm:
    """This rank's end of a group. `ranks` are MPI world ranks, stage-major: ranks[stage * tensor_parallel + shard].

    Makes no MPI call. ValueError when the product does not match, or when this process is not one of `ranks`.
    """
    if len(ranks) != tensor_parallel * pipeline_parallel:
        raise ValueError(f"group {group_id}: {len(ranks)} ranks for {tensor_parallel} × {pipeline_parallel} shards")
    if len(ranks) == 1:
        return SingleComm()
    return MpiComm(ranks, tensor_parallel, group_id)


class MpiComm:
    taken_bytes = 0

    def __init__(self, ranks: Sequence[int], tensor_parallel: int, group_id: int) -> None:
        from mpi4py import MPI  # initialises MPI, so only in processes that are part of a world

        self._mpi = MPI
        own = MPI.COMM_WORLD.Get_rank()
        if own not in ranks:
            raise ValueError(f"group {group_id}: MPI rank {own} is not one of its ranks {tuple(ranks)}")
        self._ranks = tuple(ranks)
        self._group_id = group_id
        self.stage, self.tensor_rank = divmod(self._ranks.index(own), tensor_parallel)
        self.tensor_size = tensor_parallel
        self.stages = len(self._ranks) // tensor_parallel
        self._group: Any = None  # both made by `_connect`
        self._tensor: Any = None

    def connect(self) -> None:
        """The members meet at their first exchange instead."""

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        raise NotImplementedError("nothing has to be set up beforehand on a CPU")

    def _connect(self) -> None:
        if self._group is not None:
            return
        world = self._mpi.COMM_WORLD
        members = world.Get_group().Incl(list(self._ranks))
        self._group = world.Create_group(members, tag=self._group_id % 32768)
        members.Free()
        self._tensor = self._group.Split(color=self.stage, key=self.tensor_rank)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.tensor_size == 1:
            return tensor
        self._connect()
        # MPI knows neither bf16 nor fp16; in fp32 the sum of shards also keeps more than their own precision.
        summed = tensor if tensor.dtype == torch.float32 else tensor.float()
        self._tensor.Allreduce(self._mpi.IN_PLACE, summed.numpy())
        if summed is not tensor:
            tensor.copy_(summed)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.tensor_size == 1:
            return tensor
        self._connect()
        gathered = tensor.new_empty((self.tensor_size, *tensor.shape))
        self._tensor.Allgather(_raw(tensor.contiguous()), _raw(gathered))
        return torch.cat(gathered.unbind(0), dim=-1)

    def send_next(self, tensor: torch.Tensor) -> None:
        self._connect()
        peer = (self.stage + 1) * self.tensor_size + self.tensor_rank
        _wait(self._group.Isend(_raw(tensor.contiguous()), dest=peer, tag=_HIDDEN_TAG))

    def recv_previous(self, tensor: torch.Tensor) -> torch.Tensor:
        self._connect()
        peer = (self.stage - 1) * self.tensor_size + self.tensor_rank
        _wait(self._group.Irecv(_raw(tensor), source=peer, tag=_HIDDEN_TAG))
        return tensor

    def close(self) -> None:
        if self._group is None:
            return
        self._tensor.Free()
        self._group.Free()
        self._group = self._tensor = None


def _raw(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as bytes: moving needs no arithmetic, so no dtype that MPI would have to know."""
    return tensor.view(-1).view(torch.uint8).numpy()


def _wait(request: Any) -> None:
    for _ in range(_SPINS):
        if request.Test():
            return
    while not request.Test():
        time.sleep(_POLL_S)
