"""Worker groups over torch.distributed: gloo between processes everywhere, NCCL where there are two GPUs."""

from __future__ import annotations

import socket

import pytest
import torch
from torch.multiprocessing.spawn import spawn

from workers.comm.nccl import DistributedComm, join_world

TENSOR, STAGES = 2, 2


def _rank(rank: int, endpoint: str, size: int, backend: str) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    join_world(endpoint, rank, size, 60, backend, device if backend == "nccl" else None)
    stages = size // TENSOR
    # World ranks in reverse, so that a place in the group is not the place in the world.
    ranks = tuple(reversed(range(size)))
    comm = DistributedComm(ranks, TENSOR, stages, group_id=7)
    place = ranks.index(rank)
    assert (comm.stage, comm.tensor_rank) == divmod(place, TENSOR)

    total = comm.all_reduce(torch.full((3, 4), float(place), device=device))
    members = [comm.stage * TENSOR + shard for shard in range(TENSOR)]
    assert torch.equal(total.cpu(), torch.full((3, 4), float(sum(members))))

    whole = comm.all_gather(torch.arange(6.0, device=device).view(3, 2) + 100 * comm.tensor_rank)
    expected = torch.cat([torch.arange(6.0).view(3, 2) + 100 * shard for shard in range(TENSOR)], dim=-1)
    assert torch.equal(whole.cpu(), expected)

    if comm.stage > 0:
        received = comm.recv_previous(torch.empty(5, device=device))
        assert torch.equal(received.cpu(), torch.full((5,), float(comm.tensor_rank)))
    if comm.stage < stages - 1:
        comm.send_next(torch.full((5,), float(comm.tensor_rank), device=device))

    # A second group of some of the same ranks, made without the others.
    pair = (0, 1)
    if rank in pair:
        other = DistributedComm(pair, 2, 1, group_id=8)
        assert other.all_reduce(torch.ones(1, device=device)).item() == 2
        other.close()
    comm.close()
    torch.distributed.destroy_process_group()


def _free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_shards_and_stages_over_gloo() -> None:
    size = TENSOR * STAGES
    spawn(_rank, (_free_endpoint(), size, "gloo"), nprocs=size)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < TENSOR, reason="needs two GPUs")
def test_shards_over_nccl() -> None:
    spawn(_rank, (_free_endpoint(), TENSOR, "nccl"), nprocs=TENSOR)


def test_a_group_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="group 3: 3 ranks for 2 shards"):
        DistributedComm((0, 1, 2), 2, 2, group_id=3)
