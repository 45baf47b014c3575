"""Worker groups over torch's process groups: NCCL between GPUs, one process a GPU; gloo speaks the same words between CPUs.

There is no world. The ranks of a pool share a key-value store; the members of a group, and nobody else, meet there under the
load's number, which is never used twice. Calls are enqueued on the current stream in the order they are made, and can be
captured into CUDA graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # torch.distributed exports some of them only
    AllgatherOptions,
    AllreduceOptions,
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from gateway.api.errors import ErrorCode, YardError

BACKENDS = {"cuda": "ProcessGroupNCCL", "cpu": "ProcessGroupGloo"}


def open_store(rendezvous: str, rank: int, size: int, timeout_s: float) -> Store:
    """Where the ranks of a pool meet: `file:PATH` on one machine, `tcp:HOST:PORT` (rank 0 listens there) over several."""
    kind, _, where = rendezvous.partition(":")
    if kind == "file":
        return FileStore(where, size)
    host, _, port = where.rpartition(":")
    return TCPStore(host, int(port), size, rank == 0, timedelta(seconds=timeout_s), wait_for_workers=False)


@dataclass(frozen=True)
class Meeting:
    """What a rank needs to meet others."""

    store: Store
    rank: int
    device: torch.device
    timeout_s: float  # a collective that takes longer ends the process: its peer is gone (rule 11)
    taken_bytes: Callable[[], int]  # memory of the device that is taken outside of the pool's pages

    def group(self, name: str, ranks: tuple[int, ...]) -> Any:
        """A process group of torch's; nothing is exchanged yet by NCCL, by gloo the members connect."""
        backend = getattr(dist, BACKENDS[self.device.type], None)
        if backend is None:
            raise YardError(
                ErrorCode.INVALID, f"this build of torch has no {BACKENDS[self.device.type]}; install one for CUDA on Linux"
            )
        place = ranks.index(self.rank)
        return backend(PrefixStore(name, self.store), place, len(ranks), timedelta(seconds=self.timeout_s))


class DistributedComm:
    """A `GroupComm` (see `base`) over process groups: one for the shards of this stage, one for this shard's stages."""

    def __init__(
        self, meeting: Meeting, ranks: tuple[int, ...], tensor_parallel: int, pipeline_parallel: int, number: int
    ) -> None:
        """`ranks` are ranks of the pool, stage-major: ranks[stage * tensor_parallel + shard]. Exchanges nothing."""
        if len(ranks) != tensor_parallel * pipeline_parallel:
            raise ValueError(f"group {number}: {len(ranks)} ranks for {tensor_parallel} shards × {pipeline_parallel} stages")
        if meeting.rank not in ranks:
            raise ValueError(f"group {number}: rank {meeting.rank} is not one of its ranks {ranks}")
        self.stage, self.tensor_rank = divmod(ranks.index(meeting.rank), tensor_parallel)
        self.tensor_size, self.stages = tensor_parallel, pipeline_parallel
        self._meeting = meeting
        self._name = f"group-{number}"
        self._row = ranks[self.stage * tensor_parallel : (self.stage + 1) * tensor_parallel]
        self._line = ranks[self.tensor_rank :: tensor_parallel]
        self._shards: Any = None
        self._stages: Any = None
        self._quiet = False
        self.taken_bytes = 0

    def connect(self) -> None:
        before = self._meeting.taken_bytes()
        if self.tensor_size > 1:
            self._shards = self._meeting.group(f"{self._name}-stage-{self.stage}", self._row)
        if self.stages > 1:
            self._stages = self._meeting.group(f"{self._name}-shard-{self.tensor_rank}", self._line)
        if self._meeting.device.type == "cuda":
            for group in (self._shards, self._stages):
                if group is not None:
                    group.eager_connect_single_device(self._meeting.device)
        self.taken_bytes = max(0, self._meeting.taken_bytes() - before)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._shards is None or self._quiet:
            return tensor
        options = AllreduceOptions()
        options.asyncOp = False
        _wait(self._shards.allreduce([tensor], options))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._shards is None:
            return tensor
        gathered = tensor.new_empty((self.tensor_size, *tensor.shape))
        if not self._quiet:
            options = AllgatherOptions()
            options.asyncOp = False
            _wait(self._shards._allgather_base(gathered.view(-1), tensor.reshape(-1), options))
        return torch.cat(gathered.unbind(0), dim=-1)

    def send_next(self, tensor: torch.Tensor) -> None:
        """Work enqueued after this call may reuse the tensor."""
        if not self._quiet:
            _wait(self._stages.send([tensor.contiguous()], self.stage + 1, 0))

    def recv_previous(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._quiet:
            _wait(self._stages.recv([tensor], self.stage - 1, 0))
        return tensor

    def close(self) -> None:
        for group in (self._shards, self._stages):
            if group is not None:
                group.shutdown()
        self._shards = self._stages = None


def _wait(work: Any) -> None:
    """NCCL gives nothing to wait for where it enqueued on the current stream."""
    if work is not None:
        work.wait()
