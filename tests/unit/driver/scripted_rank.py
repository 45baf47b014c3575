"""A real rank process with an engine that follows a script: `python -m scripted_rank …` in place of `python -m workers.rank`.

The next token is the sum of all tokens so far, modulo 1000. Some first prompt tokens are orders: FAIL raises inside the step,
CRASH ends the process, SLOW takes a second a step.
"""

from __future__ import annotations

import os
import time

import torch

from gateway.api.config import ModelSpec
from workers.comm.base import GroupComm
from workers.engines.base import ProgressFn
from workers.memory.arena import Arena
from workers.messages import HeldShard, LoadShard, SampledToken, Step, StepDone
from workers.rank.config import parse
from workers.rank.main import end_process, mpi_comm, run

FAIL, CRASH, SLOW = 901, 902, 903
KV_BLOCK_BYTES = 4096
WEIGHT_BYTES = 4 * 2**20
WAKE_S = 0.5


class ScriptedShard:
    def __init__(self, command: LoadShard, rank: int, arena: Arena, comm: GroupComm) -> None:
        self._command = command
        self._comm = comm
        self._last = rank == command.ranks[-command.tensor_parallel]
        self._weights = arena.reserve(f"{command.group_id}:weights", WEIGHT_BYTES)
        self._weights.commit(WEIGHT_BYTES)
        self._parked, self._copied = False, 0
        self._kv = arena.reserve(f"{command.group_id}:kv", command.kv_ceiling_blocks * KV_BLOCK_BYTES)
        self._blocks = 0
        self._sums: dict[int, int] = {}
        self._orders: dict[int, int] = {}
        self.grow_kv(command.kv_floor_blocks)

    def held(self) -> HeldShard:
        command = self._command
        return HeldShard(
            group_id=command.group_id,
            model=command.model,
            spec_json=command.spec_json,
            ranks=command.ranks,
            tensor_parallel=command.tensor_parallel,
            pipeline_parallel=command.pipeline_parallel,
            kv_blocks=self._blocks,
            kv_ceiling_blocks=command.kv_ceiling_blocks,
            kv_block_tokens=command.kv_block_tokens,
            bytes={"weights": self._weights.committed_bytes, "kv": self._kv.committed_bytes},
            digest="scripted",
            precision="bf16",
            context=64,
            parkable=True,
            parked=self._parked,
            standby_bytes=self._copied,
            wake_bytes={"weights": WEIGHT_BYTES} if self._parked else {},
        )

    def step(self, step: Step) -> StepDone | None:
        for sequence in step.released:
            del self._sums[sequence]
        sampled = []
        mark = torch.tensor([step.step])
        if self._comm.stage > 0:
            assert self._comm.recv_previous(torch.empty_like(mark)).item() == step.step, "steps of two groups were mixed up"
        if self._comm.stage < self._comm.stages - 1:
            self._comm.send_next(mark)
        for part in step.sequences:
            if part.new is not None:
                self._sums[part.sequence] = 0
                self._orders[part.sequence] = part.tokens[0]
            order = self._orders.get(part.sequence, 0)
            if order == FAIL:
                raise RuntimeError("told to fail")
            if order == CRASH:
                os._exit(99)
            if order == SLOW:
                time.sleep(1.0)
            self._sums[part.sequence] += sum(part.tokens)
            if part.sample:
                sampled.append(SampledToken(part.sequence, self._sums[part.sequence] % 1000, -1.0))
        return StepDone(step.step, step.group_id, tuple(sampled), 0.0) if self._last else None

    def grow_kv(self, blocks: int) -> None:
        self._kv.commit(blocks * KV_BLOCK_BYTES)
        self._blocks = blocks

    def save(self) -> None:
        self._copied = WEIGHT_BYTES

    def drop_copy(self) -> None:
        self._copied = 0

    def park(self) -> None:
        if self._sums:
            raise ValueError(f"{len(self._sums)} sequences")
        self._weights.commit(0)
        self.grow_kv(0)
        self._parked = True

    def wake(self, blocks: int) -> ScriptedShard:
        self._weights.commit(WEIGHT_BYTES)
        self.grow_kv(blocks)
        return self

    def wait(self, timeout_s: float) -> None:
        """Of a wake."""
        del timeout_s
        time.sleep(WAKE_S)
        self._parked, self._copied = False, 0

    def close(self) -> None:
        self._weights.close()
        self._kv.close()


class ScriptedEngine:
    def load(self, command: LoadShard, rank: int, arena: Arena, comm: GroupComm, progress: ProgressFn) -> ScriptedShard:
        source = ModelSpec.model_validate_json(command.spec_json).source
        if source == "file:broken":
            raise MemoryError("told to have no memory")
        if source.startswith("file:slow"):
            for tenth in range(10):
                progress(tenth / 10, "waiting")
                time.sleep(0.1)
        return ScriptedShard(command, rank, arena, comm)


if __name__ == "__main__":
    end_process(run(parse(), mpi_comm, lambda _: ScriptedEngine()))
