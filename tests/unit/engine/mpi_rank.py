"""One rank of an MPI world, run by `mpiexec -n N python mpi_rank.py CACHE JOBS`.

Every job is a worker group on the first ranks of the world: {name, source, tensor, pipeline, prompts, count, spec}. Rank 0
prints the answers by job name as JSON. Sampled tokens reach the other ranks over MPI here; a pool driver puts them into the
next step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mpi4py import MPI
from shard_runner import Runner, load_command

from workers.comm.mpi import make_group_comm
from workers.engines.torch.engine import TorchEngine
from workers.memory.arena import HostArena
from workers.messages import SampledToken, Step, StepDone

WORLD = MPI.COMM_WORLD


class RelayedShard:
    """Every rank of the group sees what its last stage's first shard sampled."""

    def __init__(self, shard: Any, ranks: int, source: int) -> None:
        self._shard = shard
        self._others = [rank for rank in range(ranks) if rank != source]
        self._source = source

    def step(self, step: Step) -> StepDone:
        done = self._shard.step(step)
        if done is not None:
            pairs = [(one.sequence, one.token) for one in done.sampled]
            for rank in self._others:
                WORLD.send(pairs, rank)
        else:
            pairs = WORLD.recv(source=self._source)
        return StepDone(step.step, step.group_id, tuple(SampledToken(*pair) for pair in pairs), 0.0)


def run(job: dict[str, Any], number: int, cache: Path) -> list[list[int]]:
    tensor, pipeline = job["tensor"], job["pipeline"]
    comm = make_group_comm(range(tensor * pipeline), tensor, pipeline, group_id=number)
    command = load_command(job["source"], group_id=number, tensor=tensor, pipeline=pipeline, **job["spec"])
    arena = HostArena(2**30)
    shard = TorchEngine(cache).load(command, 0, arena, comm, lambda *_: None)
    runner = Runner(RelayedShard(shard, tensor * pipeline, tensor * (pipeline - 1)), chunk=6, explicit=pipeline > 1)
    for prompt in job["prompts"]:
        runner.add(prompt, job["count"])
    answers = runner.finish()
    shard.close()
    comm.close()
    assert arena.committed_bytes == 0
    return list(answers.values())


def main() -> None:
    cache, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    answers = {}
    for number, job in enumerate(jobs, start=1):
        if WORLD.Get_rank() < job["tensor"] * job["pipeline"]:
            answers[job["name"]] = run(job, number, cache)
    WORLD.Barrier()
    if WORLD.Get_rank() == 0:
        print(json.dumps(answers))


main()
