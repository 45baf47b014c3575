"""Worker groups over torch.distributed: NCCL between GPUs, one process a GPU.

The ranks of a pool join one world at their start. A group is made by its members alone, in the order the driver loads models,
so a rank that has no part in a model never waits for it. Calls are enqueued on the current stream, in the order they are made,
and can be captured into CUDA graphs.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def join_world(
    endpoint: str, rank: int, size: int, timeout_s: float, backend: str = "nccl", device: torch.device | None = None
) -> None:
    """Meet the other ranks of the pool at `endpoint` (host:port, where rank 0 listens). Once in a process, before any group.

    A collective that takes longer than `timeout_s` ends the process: its peer is gone (rule 11).
    """
    dist.init_process_group(
        backend,
        init_method=f"tcp://{endpoint}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device,
    )


class DistributedComm:
    """A `GroupComm` (see `base`) over process groups: one for the shards of this stage, one for this shard's stages."""

    def __init__(self, ranks: tuple[int, ...], tensor_parallel: int, pipeline_parallel: int, group_id: int) -> None:
        """`ranks` are world ranks, stage-major: ranks[stage * tensor_parallel + shard]. Every member calls, nobody else."""
        if len(ranks) != tensor_parallel * pipeline_parallel:
            raise ValueError(f"group {group_id}: {len(ranks)} ranks for {tensor_parallel} shards × {pipeline_parallel} stages")
        place = ranks.index(dist.get_rank())
        self.stage, self.tensor_rank = divmod(place, tensor_parallel)
        self.tensor_size, self.stages = tensor_parallel, pipeline_parallel
        shards = ranks[self.stage * tensor_parallel : (self.stage + 1) * tensor_parallel]
        self._line = ranks[self.tensor_rank :: tensor_parallel]
        # torch sorts the ranks of a group by world rank.
        self._order = [sorted(shards).index(rank) for rank in shards]
        self._shards = _new_group(shards, f"{group_id}-shards") if tensor_parallel > 1 else None
        self._stages = _new_group(self._line, f"{group_id}-stages") if pipeline_parallel > 1 else None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._shards is not None:
            dist.all_reduce(tensor, group=self._shards)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._shards is None:
            return tensor
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.tensor_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._shards)
        return torch.cat([parts[place] for place in self._order], dim=-1)

    def send_next(self, tensor: torch.Tensor) -> None:
        """Work enqueued after this call may reuse the tensor."""
        dist.send(tensor, self._line[self.stage + 1], group=self._stages)

    def recv_previous(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.recv(tensor, self._line[self.stage - 1], group=self._stages)
        return tensor

    def close(self) -> None:
        for group in (self._shards, self._stages):
            if group is not None:
                dist.destroy_process_group(group)
        self._shards = self._stages = None


def _new_group(ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
    group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name)
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"{name}: rank {dist.get_rank()} is not among {ranks}")
    return group
