"""Worker groups over torch's process groups: gloo between processes everywhere, NCCL where there are two GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from free_port import free_port
from torch._C._distributed_c10d import HashStore
from torch.multiprocessing.spawn import spawn

from workers.comm.nccl import DistributedComm, Meeting, open_store

TENSOR, STAGES = 2, 2


def _rank(rank: int, rendezvous: str, size: int, kind: str) -> None:
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    meeting = Meeting(open_store(rendezvous, rank, size, 60), rank, device, 60, lambda: 0)
    stages = size // TENSOR
    # Ranks in reverse, so that a place in the group is not the rank.
    ranks = tuple(reversed(range(size)))
    comm = DistributedComm(meeting, ranks, TENSOR, stages, number=7)
    comm.connect()
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
        other = DistributedComm(meeting, pair, 2, 1, number=8)
        other.connect()
        with other.quiet():
            assert other.all_reduce(torch.full((1,), float(rank), device=device)).item() == rank
        assert other.all_reduce(torch.ones(1, device=device)).item() == 2
        other.close()
    comm.close()


def _free_endpoint() -> str:
    return f"127.0.0.1:{free_port()}"


def test_shards_and_stages_over_gloo() -> None:
    size = TENSOR * STAGES
    spawn(_rank, (f"tcp:{_free_endpoint()}", size, "cpu"), nprocs=size)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < TENSOR, reason="needs two GPUs")
def test_shards_over_nccl(tmp_path: Path) -> None:
    spawn(_rank, (f"file:{tmp_path / 'meeting'}", TENSOR, "cuda"), nprocs=TENSOR)


def test_a_group_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="group 3: 3 ranks for 2 shards"):
        DistributedComm(Meeting(HashStore(), 0, torch.device("cpu"), 1, lambda: 0), (0, 1, 2), 2, 2, number=3)
