"""One rank of a worker group, run by `mpiexec -n N python mpi_rank.py TENSOR PIPELINE CHECKPOINT CACHE SPEC`.

The last stage's first shard prints the answers of a fixed batch as JSON. Sampled tokens reach the other ranks over MPI here;
a pool driver puts them into the next step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shard_runner import Runner, load_command

from workers.comm.mpi import make_group_comm
from workers.engines.torch.engine import TorchEngine
from workers.memory.arena import HostArena
from workers.messages import SampledToken, Step, StepDone

PROMPTS = [[5, 9, 77, 3], [11] * 21 + [30], [99, 4]]
COUNT = 16


class RelayedShard:
    """Every rank sees what the last one sampled."""

    def __init__(self, shard, source: int) -> None:
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        self._shard = shard
        self._source = source

    def step(self, step: Step) -> StepDone:
        done = self._shard.step(step)
        found = [(one.sequence, one.token) for one in done.sampled] if done else None
        sampled = tuple(SampledToken(*pair) for pair in self._world.bcast(found, self._source))
        return StepDone(step.step, step.group_id, sampled, 0.0)


def main() -> None:
    tensor, pipeline, source, cache, spec = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], json.loads(sys.argv[5])
    comm = make_group_comm(range(tensor * pipeline), tensor, pipeline, group_id=3)
    command = load_command(source, tensor=tensor, pipeline=pipeline, **spec)
    arena = HostArena(2**30)
    shard = TorchEngine(Path(cache)).load(command, 0, arena, comm, lambda _f, _w: None)
    runner = Runner(RelayedShard(shard, tensor * (pipeline - 1)), chunk=6, explicit=pipeline > 1)
    for prompt in PROMPTS:
        runner.add(prompt, COUNT)
    answers = runner.finish()
    if comm.stage == pipeline - 1 and comm.tensor_rank == 0:
        print(json.dumps({"answers": list(answers.values()), "held": shard.held().bytes}))
    shard.close()
    comm.close()
    assert arena.committed_bytes == 0


main()
