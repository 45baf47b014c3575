"""Requests for a cold model through three gateways to one real driver with a real rank process; only the engine is scripted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import httpx
import pytest
from lone_gateway import LoneGateway, until
from scripted_pool import SECRET

from gateway.api.config import KvSpec, LimitsSpec, ModelSpec, PoolSpec
from gateway.api.proto import pool_pb2, pool_pb2_grpc
from gateway.api.proto.inference_pb2 import GenerateRequest, Sampling, TokenIds
from gateway.api.records import PoolRecord
from gateway.api.runtime import SECRET_METADATA_KEY, Runtime
from placement.types import ModelShape
from workers.driver.effects import ModelFacts
from workers.driver.local_ranks import LocalRanks
from workers.driver.replica import PoolDriverReplica

MIB = 2**20
SHAPE = ModelShape("llama", 2, 64, 2, 2, 32, 128, 1000, 64, True, (MIB, MIB), MIB, 0)
SPEC = ModelSpec(source="file:slow", kv=KvSpec(floor=2 * MIB), limits=LimitsSpec(concurrency=16, queue=600, batch_tokens=64))


class Reader:
    def facts(self, model: str, spec: ModelSpec) -> ModelFacts:
        return ModelFacts(SHAPE, "scripted", "bf16", 64, eos_ids=(999,))

    def canary_prompt(self, spec: ModelSpec) -> tuple[int, ...]:
        return (1, 2)

    async def judge(self, model: str, spec: ModelSpec, placement: str, tokens: Sequence[int]) -> str:
        return "" if list(tokens[:3]) == [3, 6, 12] else f"answered {tokens}"


class RealPool:
    """What a `LoneGateway` observes: the records of a driver that really is there."""

    name = "p"

    def __init__(self, directory: Path) -> None:
        spec = PoolSpec(device="cpu", devices=1, memory=400 * MIB)
        runtime = Runtime("cold", "", SECRET, str(directory / "cache"), str(directory), "127.0.0.1")
        launcher = LocalRanks(PoolDriverReplica.rank_config(runtime, "p", spec), 1, module="scripted_rank")
        self.driver = PoolDriverReplica(runtime, "p", spec.model_dump_json(), launcher=launcher, reader=Reader())

    def record(self) -> PoolRecord:
        return self.driver.record()

    async def stop(self) -> None:
        pass  # the gateways end before it

    @property
    def state(self) -> str:
        return ",".join(group.residency or group.state for group in self.record().groups)

    async def until(self, state: str) -> None:
        await until(lambda: self.state == state, 30)

    def switches(self) -> dict[str, int]:
        return {switch.path: switch.count for switch in self.record().switches}

    async def tell(self, residency: str) -> None:
        async with grpc.aio.insecure_channel(self.driver.endpoint) as channel:
            control = pool_pb2_grpc.PoolControlStub(channel)
            request = pool_pb2.SetResidencyRequest(model="m", residency=residency)
            await control.SetResidency(request, metadata=((SECRET_METADATA_KEY, SECRET),))

    async def assign(self) -> None:
        async with grpc.aio.insecure_channel(self.driver.endpoint) as channel:
            group = pool_pb2.Group(ranks=(0,), tensor_parallel=1, pipeline_parallel=1)
            wanted = pool_pb2.Assignment(model="m", generation=1, spec_json=SPEC.model_dump_json(), groups=[group])
            request = pool_pb2.AssignRequest(fence=1, assignments=[wanted])
            await pool_pb2_grpc.PoolControlStub(channel).Assign(request, metadata=((SECRET_METADATA_KEY, SECRET),))


@pytest.fixture
async def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RealPool]:
    scripted = Path(__file__).parents[1] / "driver"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(scripted), os.environ.get("PYTHONPATH", "")]))
    pool = RealPool(tmp_path)
    await pool.driver.start()
    await pool.assign()
    await pool.until("ready")
    yield pool
    await pool.driver.stop(end_ranks=True)


@pytest.fixture
async def gateways(pool: RealPool, tmp_path: Path, byte_level: Path) -> AsyncIterator[list[LoneGateway]]:
    lones = [LoneGateway(tmp_path / f"gateway-{index}", {"m": byte_level}) for index in range(3)]
    for lone in lones:
        await lone.start()
        lone.put_model("m", concurrency=SPEC.limits.concurrency, queue=SPEC.limits.queue)
        lone.observe(pool)  # type: ignore[arg-type] - all that is asked of it
        await lone.wait_up("p")
    beats = asyncio.create_task(_beat(lones, pool))
    yield lones
    beats.cancel()
    for lone in lones:
        await lone.stop()


async def _beat(lones: list[LoneGateway], pool: RealPool) -> None:
    while True:
        await asyncio.sleep(0.2)
        for lone in lones:
            lone.observe(pool)  # type: ignore[arg-type]


async def make_cold(pool: RealPool, gateways: list[LoneGateway]) -> None:
    await pool.tell("cold")
    await pool.until("cold")
    await until(lambda: all(lone.view.groups("m")[0][1].residency == "cold" for lone in gateways))


def request() -> GenerateRequest:
    return GenerateRequest(model="m", prompt_ids=TokenIds(ids=[5, 6]), max_tokens=3, sampling=Sampling(temperature=0))


async def test_500_requests_for_a_cold_model_through_three_gateways_load_it_once(
    pool: RealPool, gateways: list[LoneGateway]
) -> None:
    """Rule 6: held, bounded, with an estimated wait, and loaded once however many ask."""
    await make_cold(pool, gateways)
    assert pool.switches()["load"] == 1
    calls = [gateways[index % 3].inference.Generate(request(), timeout=60) for index in range(500)]
    answers = await asyncio.gather(*calls)
    assert {answer.usage.completion_tokens for answer in answers} == {3}
    assert pool.switches()["load"] == 2
    waits = [dict(await call.initial_metadata()).get("modelyard-estimated-wait-ms") for call in calls]
    assert all(int(wait) > 0 for wait in waits if wait is not None)
    assert sum(wait is not None for wait in waits) > 50, "who came while it loaded knew how long"


async def test_who_cannot_wait_is_refused_at_once_and_brings_it_in(pool: RealPool, gateways: list[LoneGateway]) -> None:
    """Rule 6: a deadline shorter than the estimate; and one that leaves is forgotten."""
    await make_cold(pool, gateways)
    clock = asyncio.get_running_loop().time
    began = clock()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await gateways[0].inference.Generate(request(), timeout=1.8)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "ready in about" in (refused.value.details() or "")
    assert clock() - began < 1.6
    assert pool.state != "cold", "the time that the refusal named would be a lie"
    stream = gateways[1].inference.GenerateStream(request(), timeout=60)
    first = await stream.read()
    assert first.held.estimated_wait_ms > 0 or first.choices, "it waits, or the load is over"
    stream.cancel()
    await until(lambda: not pool.driver.loop.core.state.held)
    await pool.until("ready")


async def test_a_caller_over_http_is_told_how_long_it_will_wait(pool: RealPool, gateways: list[LoneGateway]) -> None:
    """Rule 6: as a comment in the stream of events; and back to zero while nobody asks."""
    for residency in ("parked", "cold"):
        await pool.tell(residency)
        await pool.until(residency)
        body = {"model": "m", "prompt": "x", "max_tokens": 2, "stream": True, "temperature": 0}
        async with (
            httpx.AsyncClient() as client,
            client.stream("POST", f"{gateways[2].http}/v1/completions", json=body) as answer,
        ):
            lines = [line async for line in answer.aiter_lines() if line]
        assert lines[0].startswith(": held, about "), lines
        assert lines[-1] == "data: [DONE]"
    assert pool.switches() == {"load": 2, "park": 1, "wake": 1}
