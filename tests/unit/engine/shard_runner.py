"""Drives one shard as a pool driver does: block tables, chunked prefill, decodes of several sequences in one step."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from workers.comm.base import GroupComm
from workers.comm.single import SingleComm
from workers.engines.base import ProgressFn
from workers.engines.torch.engine import TorchEngine
from workers.engines.torch.shard import TorchShard
from workers.memory.arena import Arena, HostArena
from workers.messages import LoadShard, NewSequence, SampledToken, Sampling, SequenceStep, Step

BLOCK_TOKENS = 16


def load_command(
    source: Path | str,
    group_id: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    budget: dict[str, int] | None = None,
    floor_blocks: int = 64,
    **spec: object,
) -> LoadShard:
    document = {"source": str(source), **spec}
    ranks = tuple(range(tensor * pipeline))
    return LoadShard(
        1, group_id, "m", json.dumps(document), ranks, tensor, pipeline, BLOCK_TOKENS, floor_blocks, 256, budget or {}
    )


def load(
    source: Path | str,
    cache: Path,
    arena: Arena | None = None,
    comm: GroupComm | None = None,
    progress: ProgressFn = lambda *_: None,
    **options: object,
) -> TorchShard:
    comm = comm or SingleComm()
    command = load_command(source, tensor=comm.tensor_size, pipeline=comm.stages, **options)
    return TorchEngine(cache).load(command, 0, arena or HostArena(2**30), comm, progress)


@dataclass
class _Running:
    prompt: list[int]
    wanted: int
    sampling: Sampling
    done: int = 0  # tokens computed
    blocks: int = 0
    answer: list[SampledToken] = field(default_factory=list)
    announced: bool = False
    generated: tuple[int, ...] = ()  # before a preemption


class Runner:
    """`explicit`: send sampled tokens back in the next step (a pipeline needs it), else let the rank use its own."""

    def __init__(self, shard: TorchShard, chunk: int = 512, explicit: bool = False, scatter: bool = True) -> None:
        self.shard = shard
        self.chunk = chunk
        self.explicit = explicit
        self.steps = 0
        # Scattered block ids, so that nothing relies on neighbours.
        self._free = sorted(range(64), key=lambda block: (block * 37) % 64) if scatter else list(range(64))
        self._running: dict[int, _Running] = {}
        self._ended: list[int] = []
        self._next = 1

    def add(self, prompt: list[int], wanted: int, sampling: Sampling | None = None) -> int:
        self._running[self._next] = _Running(list(prompt), wanted, sampling or Sampling())
        self._next += 1
        return self._next - 1

    def preempted_after(self, sequence: int, generated: list[int]) -> None:
        """The prompt ends with what was generated before a preemption."""
        self._running[sequence].generated = tuple(generated)

    def step(self) -> tuple[SampledToken, ...]:
        parts = tuple(
            self._part(sequence, running) for sequence, running in self._running.items() if len(running.answer) < running.wanted
        )
        self.steps += 1
        done = self.shard.step(Step(self.steps, 1, parts, tuple(self._ended)))
        self._ended = []
        if done is None:
            return ()
        assert not done.error
        for sampled in done.sampled:
            running = self._running[sampled.sequence]
            running.answer.append(sampled)
            if len(running.answer) == running.wanted:
                self._ended.append(sampled.sequence)
        return done.sampled

    def _part(self, sequence: int, running: _Running) -> SequenceStep:
        new = None
        if not running.announced:
            prompt = tuple(running.prompt) if running.sampling.repetition_penalty != 1 else ()
            new = NewSequence(running.sampling, running.generated, prompt)
            running.announced = True
        if running.done < len(running.prompt):
            tokens = tuple(running.prompt[running.done : running.done + self.chunk])
            length = len(tokens)
        else:
            tokens = (running.answer[-1].token,) if self.explicit else ()
            length = 1
        start = running.done
        running.done += length
        wanted_blocks = -(-running.done // BLOCK_TOKENS)
        blocks = tuple(self._free.pop(0) for _ in range(wanted_blocks - running.blocks))
        running.blocks = wanted_blocks
        return SequenceStep(sequence, tokens, start, blocks, running.done >= len(running.prompt), new)

    def finish(self) -> dict[int, list[int]]:
        while any(len(running.answer) < running.wanted for running in self._running.values()):
            self.step()
        return {sequence: [one.token for one in running.answer] for sequence, running in self._running.items()}


def answer(
    shard: TorchShard, prompt: list[int], count: int, sampling: Sampling | None = None, **options: object
) -> list[SampledToken]:
    runner = Runner(shard, **options)  # pyright: ignore[reportArgumentType]
    sequence = runner.add(prompt, count, sampling)
    runner.finish()
    return runner._running[sequence].answer
