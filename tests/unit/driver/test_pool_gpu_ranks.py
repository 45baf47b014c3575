"""A cuda pool of two ranks, each a process of its own, rehearsed on CPUs: gloo for NCCL, host memory for the GPU's."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import pytest
from conftest import SECRET, Link, until

from gateway.api.checkpoint import open_checkpoint
from gateway.api.config import KvSpec, LimitsSpec, ModelSpec, PoolSpec
from gateway.api.proto import pool_pb2, pool_pb2_grpc
from gateway.api.runtime import SECRET_METADATA_KEY, Runtime
from workers.driver.effects import ModelFacts
from workers.driver.local_ranks import LocalRanks
from workers.driver.replica import PoolDriverReplica

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from random_checkpoints import greedy, save_random

METADATA = ((SECRET_METADATA_KEY, SECRET),)
GIB = 2**30
PROMPT = [5, 9, 77, 3, 41]
COUNT = 12


class Reader:
    """Facts from the checkpoint; no tokenizer, and any answer to the canary."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def facts(self, model: str, spec: ModelSpec) -> ModelFacts:
        found = open_checkpoint(spec.source, self._cache)
        return ModelFacts(found.shape, found.digest, found.precision, found.max_context, ())

    def canary_prompt(self, spec: ModelSpec) -> tuple[int, ...]:
        return (1, 2)

    async def judge(self, model: str, spec: ModelSpec, placement: str, tokens: Sequence[int]) -> str:
        return ""


class GpuPool:
    def __init__(self, directory: Path) -> None:
        self._runtime = Runtime("gpu", "", SECRET, str(directory / "cache"), str(directory), "127.0.0.1")
        self._spec = PoolSpec(device="cuda", devices=2, memory=3 * GIB)
        config = PoolDriverReplica.rank_config(self._runtime, "p", self._spec)
        self._launcher = LocalRanks(config, 2, module="workers.rank.rehearsal")
        self.driver = self.new_driver()

    def new_driver(self) -> PoolDriverReplica:
        reader = Reader(Path(self._runtime.cache_dir))
        self.driver = PoolDriverReplica(self._runtime, "p", self._spec.model_dump_json(), launcher=self._launcher, reader=reader)
        return self.driver

    async def assign(self, *groups: pool_pb2.Assignment) -> None:
        async with grpc.aio.insecure_channel(self.driver.endpoint) as channel:
            control = pool_pb2_grpc.PoolControlStub(channel)
            await control.Assign(pool_pb2.AssignRequest(fence=1, assignments=groups), metadata=METADATA)
        await until(lambda: self.states == ["ready"] * len(groups), self.driver.record, 90)

    @property
    def states(self) -> list[str]:
        return [group.state for group in self.driver.record().groups]

    async def ask(self, *models: str, count: int = COUNT) -> list[list[int]]:
        """All at once."""
        async with grpc.aio.insecure_channel(self.driver.endpoint) as channel:
            link = Link(pool_pb2_grpc.PoolLinkStub(channel).Link(metadata=METADATA))
            numbers = [await link.submit(PROMPT, max_tokens=count, model=model) for model in models]
            for number in numbers:
                end = await link.end_of(number)
                assert end.finish_reason == "length", end
            return [link.tokens[number] for number in numbers]


def group(model: str, source: Path, ranks: tuple[int, ...], stages: int = 1, floor: int = 32 * 2**20) -> pool_pb2.Assignment:
    limits = LimitsSpec(concurrency=4, batch_tokens=64)
    spec = ModelSpec(source=str(source), precision="fp32", kv=KvSpec(floor=floor), limits=limits)
    split = pool_pb2.Group(ranks=ranks, tensor_parallel=len(ranks) // stages, pipeline_parallel=stages)
    return pool_pb2.Assignment(model=model, generation=1, spec_json=spec.model_dump_json(), groups=[split])


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[GpuPool]:
    pool = GpuPool(tmp_path)
    await pool.driver.start()
    yield pool
    await pool.driver.stop(end_ranks=True)


@pytest.mark.timeout(300)
async def test_groups_that_share_ranks_compute_right_together_come_and_go_and_are_adopted(pool: GpuPool, tmp_path: Path) -> None:
    """Tensor- and pipeline-parallel groups beside whole models, in both orders of ranks, under load at once."""
    source = save_random("llama", tmp_path / "llama")
    expected = greedy(source, PROMPT, COUNT)
    groups = [
        group("tp", source, (0, 1)),
        group("tp-reversed", source, (1, 0)),
        group("pp", source, (0, 1), stages=2),
        group("one", source, (0,)),
        group("two", source, (1,)),
    ]
    names = [each.model for each in groups]
    await pool.assign(*groups)
    assert await pool.ask(*names * 6) == [expected] * 30
    for rank in pool.driver.record().ranks:
        kinds = {(model, kind) for model, kind, _ in rank.ledger}
        assert {("tp", "weights"), ("tp", "kv_floor"), ("pp", "weights")} <= kinds
        # The device's own figure beside the ledger's sum: what `held` says is all there is on a CPU.
        assert rank.unaccounted_bytes == 0, rank

    # Gone and back: a group that meets again under another number.
    await pool.assign(groups[0], groups[3])
    await until(lambda: len(pool.driver.record().groups) == 2, pool.driver.record)
    await pool.assign(*groups)
    assert await pool.ask(*names) == [expected] * 5

    # A driver that follows adopts them.
    before = pool.driver.record()
    await pool.driver.stop(end_ranks=False)
    await pool.new_driver().start()
    await pool.assign(*groups)
    after = pool.driver.record()
    assert [rank.pid for rank in after.ranks] == [rank.pid for rank in before.ranks]
    assert [(each.model, each.group) for each in after.groups] == [(each.model, each.group) for each in before.groups]
    assert await pool.ask(*names) == [expected] * 5
    pool.driver.loop.core.state.check()


@pytest.mark.timeout(300)
async def test_a_rank_that_is_killed_takes_its_group_down_and_all_comes_back(pool: GpuPool, tmp_path: Path) -> None:
    """Rule 11."""
    source = save_random("llama", tmp_path / "llama")
    groups = [group("tp", source, (0, 1)), group("one", source, (0,))]
    await pool.assign(*groups)
    pids = [rank.pid for rank in pool.driver.record().ranks]
    asked = asyncio.create_task(pool.ask("tp", count=240))
    await until(lambda: bool(pool.driver.loop.core.state.sequences), pool.driver.record)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(AssertionError, match='finish_reason: "error"'):
        await asked
    await until(lambda: not set(pids) & {rank.pid for rank in pool.driver.record().ranks}, pool.driver.record)
    await until(lambda: pool.states == ["ready", "ready"], pool.driver.record, 90)
    assert await pool.ask("tp", "one") == [greedy(source, PROMPT, COUNT)] * 2


@pytest.mark.timeout(300)
async def test_memory_that_lacks_on_one_rank_is_given_back_on_both(pool: GpuPool, tmp_path: Path) -> None:
    """Rule 3: the ledger refuses a group that one of its ranks has no room for, and what it measured fits what is held."""
    source = save_random("llama", tmp_path / "llama")
    large = group("large", source, (1,), floor=2 * GIB)
    await pool.assign(large)
    before = [rank.ledger for rank in pool.driver.record().ranks]
    async with grpc.aio.insecure_channel(pool.driver.endpoint) as channel:
        control = pool_pb2_grpc.PoolControlStub(channel)
        tp = group("tp", source, (0, 1), floor=2 * GIB)
        await control.Assign(pool_pb2.AssignRequest(fence=1, assignments=[large, tp]), metadata=METADATA)
    await until(lambda: any("rank 1" in each.reason for each in pool.driver.record().groups), pool.driver.record)
    assert [rank.ledger for rank in pool.driver.record().ranks] == before
