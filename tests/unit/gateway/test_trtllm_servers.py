"""Models whose servers run elsewhere, over TensorRT-LLM's gRPC service: a whole gateway in front of a stand-in for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from lone_gateway import LoneGateway, ids_of, until
from standin_trtllm_grpc import TrtllmGrpc
from test_inference import refused
from test_security import authority, certificate

from gateway.api.config import ModelSpec
from gateway.api.proto import inference_pb2 as pb
from gateway.api.proto import trtllm_pb2
from gateway.link.trtllm_server import TrtllmServer

ANSWER = " Paris. naïve 😀"
FACTS = Path(__file__).with_name("smg_grpc_proto.json")


@pytest.fixture
async def server(byte_level: Path) -> AsyncIterator[TrtllmGrpc]:
    server = await TrtllmGrpc(ids_of(byte_level, ANSWER)).start()
    yield server
    await server.stop()


@pytest.fixture
async def site(lone: LoneGateway, server: TrtllmGrpc, byte_level: Path) -> LoneGateway:
    """The gateway of `lone`, with a model `far` of the server beside its own `m`."""
    lone.put("Model", "far", {"source": server.source, "tokenizer": str(byte_level), "context": 128})
    await until(lambda: lone.links.serving("far"))
    return lone


def ask(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"model": "far", "prompt": "The capital is", "max_tokens": 64, **fields})


def test_names_and_numbers_are_those_of_the_service() -> None:
    facts = json.loads(FACTS.read_text())
    ours = FileDescriptorProto()
    trtllm_pb2.DESCRIPTOR.CopyToProto(ours)
    kinds = FieldDescriptorProto
    for message in ours.message_type:
        for field in message.field:
            kind, label = kinds.Type.Name(field.type)[5:].lower(), kinds.Label.Name(field.label)[6:].lower()
            assert [field.number, kind, label] == facts["messages"][message.name][field.name], f"{message.name}.{field.name}"
    (service,) = ours.service
    assert f"{ours.package}.{service.name}" == facts["service"]
    for method in service.method:
        assert [method.input_type, method.output_type, method.server_streaming] == facts["methods"][method.name]


async def test_token_ids_go_there_and_come_back(site: LoneGateway, server: TrtllmGrpc, byte_level: Path) -> None:
    sampling = pb.Sampling(temperature=0.0, seed=7)
    response = await site.inference.Generate(
        ask(sampling=sampling, return_token_ids=True, stop=["ZZ"], stop_token_ids=[5], request_id="mine"), timeout=10
    )
    choice = response.choices[0]
    assert (choice.text, choice.stop_reason, choice.finish_reason) == (ANSWER, "2", pb.FinishReason.FINISH_REASON_STOP)
    assert list(choice.token_ids) == server.ids
    usage = response.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (9, len(server.ids) + 1, 4)
    request = (await server.next()).request
    assert list(request.tokenized.input_token_ids) == ids_of(byte_level, "The capital is")
    assert (request.max_tokens, request.streaming, list(request.stop), list(request.stop_token_ids)) == (64, True, ["ZZ"], [5])
    given = request.sampling_config
    assert (given.temperature, given.top_k, given.seed, given.num_return_sequences) == (0.0, 1, 7, 1)
    assert not given.HasField("min_p")
    assert request.request_id.endswith("-mine")


async def test_a_stream_shows_each_piece_once(site: LoneGateway, server: TrtllmGrpc) -> None:
    """Rule 17: no half character; what is in the last response only is not lost, and what is in it again is not shown again."""
    server.unsent = 3
    call = site.inference.ChatStream(pb.ChatRequest(model="far", messages=[pb.Message(role="user", content="hi")], n=2))
    texts = {0: "", 1: ""}
    async for chunk in call:
        for choice in chunk.choices:
            assert "\ufffd" not in choice.text
            texts[choice.index] += choice.text
    assert texts == {0: ANSWER, 1: ANSWER}
    names = {(await server.next()).request.request_id for _ in range(2)}
    assert len(names) == 2


async def test_logprobs_and_lengths(site: LoneGateway, server: TrtllmGrpc) -> None:
    response = await site.inference.Generate(ask(logprobs=1, max_tokens=3), timeout=10)
    choice = response.choices[0]
    assert choice.finish_reason == pb.FinishReason.FINISH_REASON_LENGTH
    assert [logprob.token_id for logprob in choice.logprobs] == server.ids[: len(choice.logprobs)]
    assert all(logprob.logprob == pytest.approx(-0.5) and len(logprob.alternatives) == 1 for logprob in choice.logprobs)


async def test_the_stop_string_that_it_found_is_named(site: LoneGateway, server: TrtllmGrpc) -> None:
    server.finish = {"finish_reason": "stop", "matched_stop_str": "STOP"}
    response = await site.inference.Generate(ask(stop=["STOP"]), timeout=10)
    assert (response.choices[0].text, response.choices[0].stop_reason) == (ANSWER, "STOP")


@pytest.mark.parametrize("chunks", [0, 1])
async def test_who_leaves_is_cancelled_and_aborted_there(site: LoneGateway, server: TrtllmGrpc, chunks: int) -> None:
    """Rule 10, before the first token and after it."""
    server.hold_after = chunks
    call = site.inference.GenerateStream(ask(return_token_ids=True))
    asked = await server.next()
    if chunks:
        await call.read()
    call.cancel()
    async with asyncio.timeout(5):
        await asked.cancelled.wait()
        assert await server.aborted.get() == asked.request.request_id
    assert site.links.in_flight == 0


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT),
        (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.INTERNAL, grpc.StatusCode.INTERNAL),
    ],
)
async def test_what_it_refuses_is_said_as_ours(
    site: LoneGateway, server: TrtllmGrpc, theirs: grpc.StatusCode, ours: grpc.StatusCode
) -> None:
    server.refusal = (theirs, "too long by far")
    error = await refused(site.inference.Generate(ask(), timeout=10))
    assert (error.code(), "too long by far" in error.details()) == (ours, True)
    assert ("retry-after-ms" in dict(error.trailing_metadata() or ())) == (
        ours in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
    )


async def test_a_deadline_goes_with_the_request(site: LoneGateway, server: TrtllmGrpc) -> None:
    server.hold_after = 1
    error = await refused(site.inference.Generate(ask(), timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(5):
        await (await server.next()).cancelled.wait()


async def test_down_unhealthy_and_back(site: LoneGateway, server: TrtllmGrpc) -> None:
    await server.stop()
    error = await refused(site.inference.Generate(ask(), timeout=10))
    assert (error.code(), "cannot be reached" in error.details()) == (grpc.StatusCode.UNAVAILABLE, True)
    server.health = "the executor is dead"
    await server.start()
    await until(lambda: "the executor is dead" in site.links.server("far").reason)
    assert not site.links.serving("far")
    server.health = "OK"
    await until(lambda: site.links.serving("far"))
    (record,) = site.links.servers()
    assert (record.state, record.context) == ("ready", 128)
    assert (await site.inference.Generate(ask(), timeout=10)).choices[0].text == ANSWER


async def test_tls_and_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte_level: Path) -> None:
    authority(tmp_path, "ca")
    cert, key = certificate(tmp_path, "server")
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    server = await TrtllmGrpc([5], credentials=credentials, key="sesame").start()
    monkeypatch.setenv("FAR_KEY", "sesame")
    settings = {"ca": str(tmp_path / "ca.pem"), "key_env": "FAR_KEY"}
    spec = ModelSpec.model_validate({"source": server.source, "tokenizer": str(byte_level), "server": settings})
    link = TrtllmServer("far", spec)
    try:
        assert (await link.look()).context == 128
        monkeypatch.setenv("FAR_KEY", "wrong")
        with pytest.raises(Exception, match=r"UNAUTHENTICATED: wrong key; see server.key_env"):
            await link.look()
        monkeypatch.delenv("FAR_KEY")
        with pytest.raises(Exception, match="the variable FAR_KEY is not set"):
            await link.look()
    finally:
        await link.close()
        await server.stop()


async def test_a_server_of_another_kind_is_said(byte_level: Path) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = TrtllmServer("far", ModelSpec(source=f"trtllm+grpc://127.0.0.1:{port}", tokenizer=str(byte_level)))
    try:
        with pytest.raises(Exception, match="it must be `trtllm-serve --grpc`"):
            await link.look()
    finally:
        await link.close()
        await server.stop(None)
