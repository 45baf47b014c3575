"""grpc.health.v1 and reflection, as load balancers and grpcurl use them."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from lone_gateway import LoneGateway
from scripted_pool import ScriptedPool

SERVING, NOT_SERVING, UNKNOWN = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING, HealthCheckResponse.SERVICE_UNKNOWN


async def status(lone: LoneGateway, name: str) -> int:
    return (await HealthStub(lone.channel).Check(HealthCheckRequest(service=name), timeout=5)).status


async def test_check(lone: LoneGateway, pool: ScriptedPool) -> None:
    lone.put("Route", "chat", {"targets": [{"model": "m"}], "aliases": ["assistant"]})
    for name in ("", "modelyard.v1.Inference", "m", "chat", "assistant"):
        assert await status(lone, name) == SERVING, name
    lone.observe(pool, state="failed")
    assert await status(lone, "") == SERVING
    for name in ("m", "chat", "assistant"):
        assert await status(lone, name) == NOT_SERVING, name
    lone.delete("Route", "chat")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await status(lone, "chat")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_draining(lone: LoneGateway) -> None:
    lone.health.set_accepting(False)
    assert [await status(lone, name) for name in ("", "m")] == [NOT_SERVING, NOT_SERVING]


async def test_watch(lone: LoneGateway, pool: ScriptedPool) -> None:
    """Also of a name that comes and goes (rule 13: no ghost routes)."""
    watch = aiter(HealthStub(lone.channel).Watch(HealthCheckRequest(service="chat"), timeout=20))
    assert (await anext(watch)).status == UNKNOWN
    lone.put("Route", "chat", {"targets": [{"model": "m"}]})
    assert (await anext(watch)).status == SERVING
    lone.observe(pool, state="draining")
    assert (await anext(watch)).status == NOT_SERVING
    lone.delete("Route", "chat")
    assert (await anext(watch)).status == UNKNOWN
    more = asyncio.ensure_future(anext(watch))
    lone.put("Route", "chat2", {"targets": [{"model": "m"}]})
    done, _ = await asyncio.wait([more], timeout=0.2)
    assert not done
    more.cancel()


async def test_reflection(lone: LoneGateway) -> None:
    async def ask():
        yield ServerReflectionRequest(list_services="")
        yield ServerReflectionRequest(file_containing_symbol="modelyard.v1.Inference")

    answers = [answer async for answer in ServerReflectionStub(lone.channel).ServerReflectionInfo(ask(), timeout=5)]
    assert {service.name for service in answers[0].list_services_response.service} == {
        "modelyard.v1.Inference",
        "inference.GRPCInferenceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert answers[1].file_descriptor_response.file_descriptor_proto
