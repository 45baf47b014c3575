"""inference.GRPCInferenceService, as clients of Triton use it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from lone_gateway import LoneGateway, ids_of
from scripted_pool import ScriptedPool, SubmittedSequence

from gateway.api.proto import admin_pb2
from gateway.api.proto import kserve_pb2 as pb
from gateway.api.proto.admin_pb2_grpc import AdminServicer
from gateway.api.proto.kserve_pb2_grpc import GRPCInferenceServiceStub

TYPES = {str: ("BYTES", "bytes_contents"), bool: ("BOOL", "bool_contents"), int: ("INT32", "int_contents")}
TYPES[float] = ("FP32", "fp32_contents")


def stub(lone: LoneGateway) -> GRPCInferenceServiceStub:
    return GRPCInferenceServiceStub(lone.channel)


def ask(id: str = "", model: str = "m", shape: Sequence[int] | None = None, **inputs: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, id=id)
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        datatype, field = TYPES[type(values[0])]
        tensor = request.inputs.add(
            name=name, datatype=datatype, shape=shape if name == "text_input" and shape else [len(values)]
        )
        getattr(tensor.contents, field).extend(text.encode() if isinstance(text, str) else text for text in values)
    return request


def say(text: str, lone: LoneGateway):
    """Every sequence is answered with the text, token by token."""

    def script(sequence: SubmittedSequence) -> None:
        for token in ids_of(lone.texts["m"], text):
            sequence.tokens([token])
        sequence.end("stop")

    return script


async def test_the_tensors_reach_the_engine(lone: LoneGateway, pool: ScriptedPool) -> None:
    call = stub(lone).ModelInfer(
        ask("7", text_input="Hi", max_tokens=5, temperature=0.5, top_k=3, top_p=0.75, random_seed=11, stop_words=["b", "zz"]),
        timeout=10,
    )
    sequence = await pool.next()
    submit = sequence.submit
    sampling = submit.sampling
    assert (submit.request_id, submit.max_tokens, list(submit.prompt_ids)) == ("7", 5, ids_of(lone.texts["m"], "Hi"))
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 3, 0.75, 11)
    sequence.tokens(ids_of(lone.texts["m"], "aabaa"))
    answer = await call
    assert (answer.id, answer.outputs[0].name, list(answer.outputs[0].shape)) == ("7", "text_output", [1])
    assert answer.outputs[0].contents.bytes_contents[0] == b"aa"
    assert answer.parameters["modelyard_model"].string_param == "m"


async def test_ids_in_and_out_raw(lone: LoneGateway, pool: ScriptedPool) -> None:
    pool.script = say("xyz", lone)
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="input_ids", datatype="INT64", shape=[1, 2])
    request.inputs.add(name="end_id", datatype="INT32", shape=[1, 1])
    request.raw_input_contents.extend([b"".join(n.to_bytes(8, "little") for n in (65, 66)), (9).to_bytes(4, "little")])
    answer = await stub(lone).ModelInfer(request, timeout=10)
    assert (list(pool.sequences[0].submit.prompt_ids), list(pool.sequences[0].submit.stop_token_ids)) == ([65, 66], [9])
    expected = ids_of(lone.texts["m"], "xyz")
    assert list(answer.outputs[0].shape) == [1, len(expected)]
    assert answer.raw_output_contents[0] == b"".join(n.to_bytes(4, "little") for n in expected)


async def test_several_prompts_at_once(lone: LoneGateway, pool: ScriptedPool) -> None:
    def echo(sequence: SubmittedSequence) -> None:
        sequence.tokens(sequence.submit.prompt_ids)
        sequence.end("length")

    pool.script = echo
    answer = await stub(lone).ModelInfer(ask(text_input=["one", "two"], shape=[2, 1], max_tokens=4), timeout=10)
    assert list(answer.outputs[0].shape) == [2, 1]
    assert list(answer.outputs[0].contents.bytes_contents) == [b"one", b"two"]


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (ask(max_tokens=3), "text_input"),
        (ask(text_input="x", bad_words="y"), "bad_words"),
        (ask(text_input="x", max_tokens=1.5), "max_tokens"),
        (ask(text_input="x", temperature=-1.0), "temperature"),
        (ask(text_input="x", stream=True), "ModelStreamInfer"),
        (ask(text_input="x", shape=[2]), "text_input"),
        (ask(text_input="x", max_tokens=[1, 2]), "max_tokens"),
        (ask(text_input="x", top_p=2.0), "top_p"),
    ],
)
async def test_what_cannot_be_read_is_named(lone: LoneGateway, request_: pb.ModelInferRequest, named: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub(lone).ModelInfer(request_, timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert named in (caught.value.details() or "")


async def test_a_stream_answers_side_by_side_and_says_which_is_the_last(lone: LoneGateway, pool: ScriptedPool) -> None:
    call = stub(lone).ModelStreamInfer(timeout=20)
    await call.write(ask("one", text_input="a", stream=True))
    first = await pool.next()
    await call.write(ask("two", text_input="b", stream=True))
    second = await pool.next()
    await call.write(ask("bad", model="nobody", text_input="b"))
    refused = await call.read()
    assert "nobody" in refused.error_message
    assert refused.infer_response.id == "bad"
    for sequence, text in ((second, "x"), (first, "y"), (second, "z")):
        sequence.tokens(ids_of(lone.texts["m"], text))
        response = (await call.read()).infer_response
        assert response.id == ("one" if sequence is first else "two")
        assert response.outputs[0].contents.bytes_contents[0] == text.encode()
        assert not response.parameters["triton_final_response"].bool_param
    await call.done_writing()
    for sequence, id in ((first, "one"), (second, "two")):
        sequence.end("length")
        response = (await call.read()).infer_response
        assert (response.id, response.parameters["triton_final_response"].bool_param) == (id, True)
    assert not isinstance(await call.read(), pb.ModelStreamInferResponse)


async def test_who_leaves_a_stream_is_cancelled(lone: LoneGateway, pool: ScriptedPool) -> None:
    """Rule 10, for all requests of the stream."""
    call = stub(lone).ModelStreamInfer()
    await call.write(ask(text_input="a", stream=True))
    await call.write(ask(text_input="b"))
    sequences = [await pool.next(), await pool.next()]
    call.cancel()
    async with asyncio.timeout(10):
        for sequence in sequences:
            await sequence.cancelled.wait()


async def test_a_request_of_a_stream_has_its_own_deadline(lone: LoneGateway, pool: ScriptedPool) -> None:
    call = stub(lone).ModelStreamInfer(timeout=20)
    late = ask("late", text_input="a")
    late.parameters["timeout"].int64_param = 150_000
    await call.write(late)
    assert "deadline" in (await call.read()).error_message


async def test_what_is_known_of_a_model(lone: LoneGateway, pool: ScriptedPool) -> None:
    lone.put("Route", "chat", {"targets": [{"model": "m"}]})
    pool.script = say("ab", lone)
    await stub(lone).ModelInfer(ask(model="chat", text_input="x"), timeout=10)
    names = {
        tensor.name: tensor.datatype for tensor in (await stub(lone).ModelMetadata(pb.ModelMetadataRequest(name="chat"))).inputs
    }
    assert names["text_input"] == "BYTES"
    assert names["temperature"] == "FP32"
    config = (await stub(lone).ModelConfig(pb.ModelConfigRequest(name="chat"))).config
    assert config.model_transaction_policy.decoupled
    assert config.parameters["max_context"].string_value == "256"
    statistics = (await stub(lone).ModelStatistics(pb.ModelStatisticsRequest(name="chat"))).model_stats
    assert [(entry.name, entry.inference_count) for entry in statistics] == [("m", 1)]
    assert statistics[0].inference_stats.success.ns > 0
    assert (await stub(lone).ModelReady(pb.ModelReadyRequest(name="chat"))).ready
    assert not (await stub(lone).ModelReady(pb.ModelReadyRequest(name="modelyard.v1.Inference"))).ready
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub(lone).ModelMetadata(pb.ModelMetadataRequest(name="chat", version="2"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


class Admin(AdminServicer):
    """Does at once what it is asked, to the view of the gateway under test."""

    def __init__(self, lone: LoneGateway, pool: ScriptedPool) -> None:
        self._lone = lone
        self._pool = pool
        self.residencies: list[str] = []

    async def Apply(self, request: admin_pb2.ApplyRequest, context: object) -> admin_pb2.ApplyResponse:
        document = json.loads(request.objects[0].manifest_json)
        self._lone.put("Model", document["metadata"]["name"], document["spec"])
        self._lone.observe(self._pool, state="ready" if document["spec"].get("replicas", 1) else "draining")
        if not document["spec"].get("replicas", 1):
            self._lone.forget(self._pool)
        return admin_pb2.ApplyResponse(revision=self._lone.view.revision)

    async def SetResidency(self, request: admin_pb2.SetResidencyRequest, context: object) -> admin_pb2.SetResidencyResponse:
        self.residencies.append(request.residency)
        self._lone.observe(self._pool, state={"resident": "ready", "parked": "parked"}[request.residency])
        return admin_pb2.SetResidencyResponse()


@pytest.fixture
def admin(lone: LoneGateway, pool: ScriptedPool) -> Admin:
    admin = Admin(lone, pool)
    lone.repository.admin = admin
    return admin


async def index(lone: LoneGateway) -> dict[str, tuple[str, str]]:
    answer = await stub(lone).RepositoryIndex(pb.RepositoryIndexRequest())
    return {entry.name: (entry.state, entry.reason) for entry in answer.models}


async def test_unload_parks_and_load_wakes(lone: LoneGateway, admin: Admin) -> None:
    assert await index(lone) == {"m": ("READY", "")}
    await stub(lone).RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="m"), timeout=5)
    assert (await index(lone))["m"] == ("UNAVAILABLE", "parked: the next request wakes it")
    await stub(lone).RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="m"), timeout=5)
    assert admin.residencies == ["parked", "resident"]
    assert (await index(lone))["m"][0] == "READY"


async def test_unload_removes_and_load_places(lone: LoneGateway, admin: Admin) -> None:
    remove = (("modelyard-unload", "remove"),)
    await stub(lone).RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="m"), timeout=5, metadata=remove)
    assert lone.view.models["m"].spec.replicas == 0
    await stub(lone).RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="m"), timeout=5)
    assert lone.view.models["m"].spec.replicas == 1
    load = pb.RepositoryModelLoadRequest(model_name="m")
    load.parameters["config"].string_param = json.dumps({"source": "file:elsewhere", "priority": 3})
    await stub(lone).RepositoryModelLoad(load, timeout=5)
    assert lone.view.models["m"].spec.priority == 3
    assert not admin.residencies


async def test_a_load_that_fails_says_why(lone: LoneGateway, admin: Admin, pool: ScriptedPool) -> None:
    lone.observe(pool, state="failed")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub(lone).RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="m"), timeout=5)
    assert "failed to load" in (caught.value.details() or "")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub(lone).RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="nobody"), timeout=5)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
