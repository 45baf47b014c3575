"""A rank's compute thread with a shard that enqueues: steps are taken ahead of results, and reported in order."""

from __future__ import annotations

import json
import queue
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "engine"))

from gpu_machines import Machine
from random_checkpoints import greedy, save_random
from safetensors.torch import load_file, save_file
from shard_runner import answer
from shard_runner import load as load_on_cpu

from workers.comm.single import SingleComm
from workers.engines.torch.cuda.engine import GpuEngine
from workers.engines.torch.cuda.residency import ParkingSpace
from workers.memory.arena import HostArena
from workers.messages import (
    Done,
    GrowKv,
    HeldShard,
    LoadShard,
    NewSequence,
    ParkShard,
    Report,
    Sampling,
    SequenceStep,
    Step,
    StepDone,
    UnloadShard,
    WakeShard,
)
from workers.rank.compute import ComputeThread

COUNT = 12
PROMPT = [5, 9, 77, 3]


class Rank:
    def __init__(self, cache: Path, machine: Machine | None = None) -> None:
        """On host memory, or with a machine on its arena, where models can be parked."""
        self.arena: Any = machine.arena if machine else HostArena(2**30)
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.fatal: list[str] = []
        engine = GpuEngine(cache, torch.device("cpu"), ParkingSpace(machine.pinned, machine.engine) if machine else None)
        self.compute = ComputeThread(
            0, self.arena, lambda *_: SingleComm(), lambda _: engine, report=self.reports.put, fatal=self.fatal.append
        )
        self.compute.start()

    def wait(self, kind: type) -> Report:
        while not isinstance(report := self.reports.get(timeout=60), kind):
            pass
        return report


@pytest.fixture
def rank(tmp_path: Path):
    made = Rank(tmp_path / "cache")
    yield made
    assert made.compute.stop(30.0)
    assert made.arena.committed_bytes == 0
    assert not made.fatal


def load(rank: Rank, directory: Path, group_id: int = 7) -> None:
    spec = json.dumps({"source": str(directory), "precision": "fp32"})
    rank.compute.submit(LoadShard(1, group_id, "m", spec, (0,), 1, 1, 16, 8, 16, {}))
    done = rank.wait(Done)
    assert isinstance(done, Done)
    assert not done.error
    assert done.held is not None


def test_steps_are_sent_ahead_and_reported_in_order(rank: Rank, tmp_path: Path) -> None:
    directory = save_random("llama", tmp_path / "llama")
    load(rank, directory)
    new = NewSequence(Sampling())
    rank.compute.submit(Step(1, 7, (SequenceStep(1, tuple(PROMPT), 0, (3, 0), True, new),)))
    for number in range(2, COUNT + 1):
        rank.compute.submit(Step(number, 7, (SequenceStep(1, (), len(PROMPT) + number - 2, (), True),)))
    rank.compute.submit(GrowKv(2, 7, 16))
    found = [rank.wait(StepDone) for _ in range(COUNT)]
    assert [done.step for done in found] == list(range(1, COUNT + 1))  # type: ignore[union-attr]
    assert [done.sampled[0].token for done in found] == greedy(directory, PROMPT, COUNT)  # type: ignore[union-attr]
    rank.compute.submit(UnloadShard(3, 7))
    rank.wait(Done)


def test_a_step_that_cannot_be_enqueued_fails_alone(rank: Rank, tmp_path: Path) -> None:
    directory = save_random("llama", tmp_path / "llama")
    load(rank, directory)
    rank.compute.submit(Step(1, 7, (SequenceStep(1, (5,), 0, (99,), True, NewSequence(Sampling())),)))
    failed = rank.wait(StepDone)
    assert isinstance(failed, StepDone)
    assert "mapped ones" in failed.error
    rank.compute.submit(Step(2, 7, (SequenceStep(2, tuple(PROMPT), 0, (0,), True, NewSequence(Sampling())),)))
    done = rank.wait(StepDone)
    assert isinstance(done, StepDone)
    assert [one.token for one in done.sampled] == greedy(directory, PROMPT, 1)


def test_weights_that_give_nan_fail_steps_and_not_the_rank(rank: Rank, tmp_path: Path) -> None:
    """Rule 7: the next load on this rank works."""
    directory = save_random("llama", tmp_path / "llama")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][PROMPT[2], 1] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    load(rank, directory)
    new = NewSequence(Sampling())
    rank.compute.submit(Step(1, 7, (SequenceStep(1, tuple(PROMPT), 0, (3, 0), True, new),)))
    rank.compute.submit(Step(2, 7, (SequenceStep(1, (), len(PROMPT), (), True),)))  # sent ahead
    for _ in range(2):
        done = rank.wait(StepDone)
        assert isinstance(done, StepDone)
        assert done.damaged
        assert "NaN" in done.error
    rank.compute.submit(UnloadShard(3, 7))
    rank.wait(Done)
    load(rank, save_random("qwen3", tmp_path / "qwen3"))
    rank.compute.submit(UnloadShard(4, 7))
    rank.wait(Done)


def test_a_seed_gives_the_text_that_it_gives_on_a_cpu(rank: Rank, tmp_path: Path) -> None:
    directory = save_random("llama", tmp_path / "llama")
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=77)
    wanted = [one.token for one in answer(load_on_cpu(directory, tmp_path, precision="fp32"), PROMPT, COUNT, sampling)]
    load(rank, directory)
    rank.compute.submit(Step(1, 7, (SequenceStep(1, tuple(PROMPT), 0, (3, 0), True, NewSequence(sampling)),)))
    for number in range(2, COUNT + 1):
        rank.compute.submit(Step(number, 7, (SequenceStep(1, (), len(PROMPT) + number - 2, (), True),)))
    found = [rank.wait(StepDone) for _ in range(COUNT)]
    assert [done.sampled[0].token for done in found] == wanted  # type: ignore[union-attr]
    rank.compute.submit(UnloadShard(3, 7))
    rank.wait(Done)


def held_after(rank: Rank, command: ParkShard | WakeShard) -> HeldShard:
    rank.compute.submit(command)
    done = rank.wait(Done)
    assert isinstance(done, Done)
    assert not done.error
    assert done.held is not None
    return done.held


def test_a_parked_model_leaves_its_pages_and_answers_as_before_when_it_is_back(tmp_path: Path) -> None:
    """Rule 5: a step in between is refused. The arena is the GPU's, over memory files."""
    directory = save_random("llama", tmp_path / "llama")
    machine = Machine(512, real=False)
    rank = Rank(tmp_path / "cache", machine)
    load(rank, directory)
    resident = machine.arena.committed_bytes
    first = Step(1, 7, (SequenceStep(1, tuple(PROMPT), 0, (0,), True, NewSequence(Sampling())),))
    rank.compute.submit(first)
    expected = rank.wait(StepDone)
    for number in range(2):
        parked = held_after(rank, ParkShard(2, 7, released=(1,)))
        assert (parked.parkable, parked.parked, parked.bytes["weights"], parked.bytes["kv"]) == (True, True, 0, 0)
        assert parked.wake_bytes["weights"] > 0
        assert parked.standby_bytes > 0
        assert machine.arena.committed_bytes == 0
        rank.compute.submit(first)
        refused = rank.wait(StepDone)
        assert isinstance(refused, StepDone)
        assert "parked" in refused.error
        awake = held_after(rank, WakeShard(3, 7, 8))
        assert (awake.parked, awake.kv_blocks, awake.wake_bytes) == (False, 8, {})
        assert machine.arena.committed_bytes == resident
        rank.compute.submit(first)
        again = rank.wait(StepDone)
        assert again.sampled == expected.sampled, number  # type: ignore[union-attr]
    assert rank.compute.stop(30.0)
    machine.close()


def test_a_wake_that_fails_leaves_the_model_parked(tmp_path: Path) -> None:
    machine = Machine(512, real=False)
    rank = Rank(tmp_path / "cache", machine)
    load(rank, save_random("llama", tmp_path / "llama"))
    held_after(rank, ParkShard(2, 7))
    machine.driver.arm("grant", 4)
    rank.compute.submit(WakeShard(3, 7, 8))
    done = rank.wait(Done)
    assert isinstance(done, Done)
    assert done.error
    assert done.held is not None
    assert done.held.parked
    assert machine.arena.committed_bytes == 0
    assert held_after(rank, WakeShard(4, 7, 8)).kv_blocks == 8
    assert rank.compute.stop(30.0)
    machine.close()


def test_a_model_in_memory_leaves_its_copy_to_one_that_parks(tmp_path: Path) -> None:
    """Rule 3: host memory that holds one copy parks one after the other. A copy that is needed stays."""
    directory = save_random("llama", tmp_path / "llama")
    machine = Machine(512, real=False)
    rank = Rank(tmp_path / "cache", machine)
    for group_id in (7, 8):
        load(rank, directory, group_id)
    first = held_after(rank, ParkShard(2, 7))
    assert held_after(rank, WakeShard(3, 7, 8)).standby_bytes == first.standby_bytes > 0
    used = machine.pinned.pinned_bytes - machine.pinned.free_bytes
    held_after(rank, ParkShard(4, 8, drop_copies=(7,)))
    assert machine.pinned.pinned_bytes - machine.pinned.free_bytes == used, "one copy in the place of the other"
    held_after(rank, ParkShard(5, 7, drop_copies=(8,)))
    assert machine.pinned.pinned_bytes - machine.pinned.free_bytes == 2 * used, "8 is parked: its copy is all there is of it"
    for op, group_id in ((6, 7), (7, 8)):
        assert held_after(rank, WakeShard(op, group_id, 8)).bytes["weights"] > 0
    assert rank.compute.stop(30.0)
    machine.close()
