from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import grpc
import pytest

from gateway.api.config import KvSpec, LimitsSpec, ModelSpec, PoolSpec
from gateway.api.pool_channel import pool_channel
from gateway.api.proto import pool_pb2, pool_pb2_grpc
from gateway.api.runtime import SECRET_METADATA_KEY, Runtime
from placement.types import ModelShape
from workers.driver.effects import ModelFacts
from workers.driver.local_ranks import LocalRanks
from workers.driver.replica import PoolDriverReplica

MIB = 2**20
SECRET = "not-a-secret"
SHAPE = ModelShape(
    family="llama",
    layers=2,
    hidden=64,
    heads=2,
    kv_heads=2,
    head_dim=32,
    intermediate=128,
    vocabulary=1000,
    max_context=64,
    tied_embeddings=True,
    layer_bytes=(MIB, MIB),
    embedding_bytes=MIB,
    head_bytes=0,
)


class ScriptedReader:
    """The `ModelReader` of models that the scripted engine serves."""

    def facts(self, model: str, spec: ModelSpec) -> ModelFacts:
        return ModelFacts(SHAPE, "scripted", "bf16", 64, eos_ids=(999,))

    def canary_prompt(self, spec: ModelSpec) -> tuple[int, ...]:
        return (1, 2)

    async def judge(self, model: str, spec: ModelSpec, placement: str, tokens: Sequence[int]) -> str:
        return "" if list(tokens[:3]) == [3, 6, 12] else f"answered {tokens}"


class Pool:
    """A driver with real rank processes, and a gateway's end of its link."""

    def __init__(
        self, directory: Path, devices: int, *, grace_s: float = 30.0, redis_url: str = "", site: str = "test", tls: bool = False
    ) -> None:
        self.spec = PoolSpec(device="cpu", devices=devices, memory=400 * MIB, rank_grace_s=max(grace_s, 1))
        self.runtime = Runtime(
            site=site,
            redis_url=redis_url,
            secret=SECRET,
            cache_dir=str(directory / "cache"),
            run_dir=str(directory),
            bind_host="127.0.0.1",
            internal_tls=tls,
        )
        self.devices = devices
        self.driver = self.new_driver()
        self._channel: grpc.aio.Channel | None = None

    def new_driver(self) -> PoolDriverReplica:
        config = PoolDriverReplica.rank_config(self.runtime, "p", self.spec)
        driver = PoolDriverReplica(
            self.runtime,
            "p",
            self.spec.model_dump_json(),
            launcher=LocalRanks(config, self.devices, module="scripted_rank"),
            reader=ScriptedReader(),
        )
        self.driver = driver
        return driver

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((SECRET_METADATA_KEY, SECRET),)

    async def start(self, *groups: pool_pb2.Assignment) -> None:
        await self.driver.start()
        self._channel = pool_channel(self.driver.endpoint, SECRET)
        if groups:
            await self.assign(*groups)
            await self.until_ready()

    async def stop(self, *, end_ranks: bool) -> None:
        if self._channel is not None:
            await self._channel.close()
        await self.driver.stop(end_ranks=end_ranks)

    @property
    def control(self) -> pool_pb2_grpc.PoolControlStub:
        return pool_pb2_grpc.PoolControlStub(self._channel)

    async def assign(self, *groups: pool_pb2.Assignment, fence: int = 1) -> None:
        await self.control.Assign(pool_pb2.AssignRequest(fence=fence, assignments=groups), metadata=self.metadata)

    async def link(self) -> Link:
        link = Link(pool_pb2_grpc.PoolLinkStub(self._channel).Link(metadata=self.metadata))
        await link.call.write(pool_pb2.UpFrame(gateway="g"))
        return link

    async def until_ready(self) -> None:
        await until(lambda: self._all_in("ready"), lambda: self.driver.record())

    def _all_in(self, state: str) -> bool:
        groups = self.driver.record().groups
        return bool(groups) and all(group.state == state for group in groups)

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.driver.record().ranks]


class Link:
    """Collects what comes down."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self.call = call
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, pool_pb2.End] = {}
        self.holds: dict[int, pool_pb2.Hold] = {}
        self.frames: list[pool_pb2.DownFrame] = []
        self._next = 1

    async def submit(self, prompt: Sequence[int], max_tokens: int = 4, model: str = "m", *, timeout_ms: int = 0) -> int:
        number = self._next
        self._next += 1
        sampling = pool_pb2.SamplingParams(top_p=1, repetition_penalty=1, logprobs=-1)
        submit = pool_pb2.Submit(
            id=number, model=model, prompt_ids=prompt, max_tokens=max_tokens, sampling=sampling, timeout_ms=timeout_ms
        )
        await self.call.write(pool_pb2.UpFrame(submits=[submit]))
        return number

    async def cancel(self, number: int) -> None:
        await self.call.write(pool_pb2.UpFrame(cancels=[number]))

    async def next(self) -> pool_pb2.DownFrame:
        frame = await asyncio.wait_for(self.call.read(), 20)
        assert isinstance(frame, pool_pb2.DownFrame), "the stream ended"
        self.frames.append(frame)
        for tokens in frame.tokens:
            self.tokens.setdefault(tokens.id, []).extend(tokens.ids)
        self.ends.update({end.id: end for end in frame.ends})
        self.holds.update({hold.id: hold for hold in frame.holds})
        return frame

    async def end_of(self, number: int) -> pool_pb2.End:
        while number not in self.ends:
            await self.next()
        return self.ends[number]


def assignment(model: str = "m", ranks: Sequence[int] = (0,), *, stages: int = 1, source: str = "file:x") -> pool_pb2.Assignment:
    limits = LimitsSpec(concurrency=4, queue=8, batch_tokens=32)
    spec = ModelSpec(source=source, kv=KvSpec(floor=2 * MIB), limits=limits)
    group = pool_pb2.Group(ranks=ranks, tensor_parallel=len(ranks) // stages, pipeline_parallel=stages)
    return pool_pb2.Assignment(model=model, generation=1, spec_json=spec.model_dump_json(), groups=[group])


async def until(condition: Callable[[], bool], describe: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Poll a condition of another process. AssertionError says how things stood."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(describe()) from None


PoolFactory = Callable[..., Awaitable[Pool]]


@pytest.fixture
async def make_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PoolFactory]:
    """`await make_pool(assignments…, devices=2)`: a pool whose models are ready."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    pools: list[Pool] = []

    async def make(*groups: pool_pb2.Assignment, devices: int = 1, **options: object) -> Pool:
        pool = Pool(tmp_path, devices, **options)  # type: ignore[arg-type]
        pools.append(pool)
        await pool.start(*groups)
        return pool

    yield make
    for pool in pools:
        await pool.stop(end_ranks=True)
