"""JSON schemas of answers, as OpenAI's and gRPC's clients send them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from lone_gateway import LoneGateway, ids_of
from scripted_pool import ScriptedPool, SubmittedSequence

from gateway.api.config import ModelSpec
from gateway.api.errors import ErrorCode, YardError
from gateway.api.proto import inference_pb2 as pb
from gateway.servers.request import GenerationRequest, check_constraint
from gateway.text import schema_check
from gateway.text.schema_check import SchemaCheck

FIELD = "response_format.json_schema.schema"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def with_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}}


async def post(lone: LoneGateway, **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    async with httpx.AsyncClient() as client:
        return await client.post(f"{lone.http}/v1/chat/completions", json=body)


async def test_the_schema_goes_to_the_pool_with_every_choice(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    seen: list[str] = []

    def answer(sequence: Any) -> None:
        seen.append(sequence.submit.sampling.json_schema)
        sequence.end("length", tokens=ids_of(byte_level, '{"n": 1'))

    pool.script = answer
    response = await post(lone, n=2, **with_schema(SCHEMA))
    assert [choice["finish_reason"] for choice in response.json()["choices"]] == ["length"] * 2
    await post(lone, response_format={"type": "json_object"})
    await post(lone, response_format={"type": "text"})
    await lone.inference.Generate(pb.GenerateRequest(model="m", prompt="x", json_schema=json.dumps(SCHEMA)))
    assert [json.loads(schema or "null") for schema in seen] == [SCHEMA, SCHEMA, {"type": "object"}, None, SCHEMA]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (with_schema({"not": {"type": "string"}}), FIELD, '"not"'),
        (with_schema({"type": "string", "pattern": "(abc"}), FIELD, "regex parse error: unclosed group, in (abc"),
        (with_schema(5), FIELD, "must be an object"),
        ({"response_format": "json"}, "response_format.type", "json_schema"),
        ({**with_schema(SCHEMA), "ignore_eos": True}, "ignore_eos", "response_format"),
    ],
)
async def test_what_is_not_supported_is_said(lone: LoneGateway, fields: dict[str, Any], param: str, said: str) -> None:
    response = await post(lone, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert said in response.json()["error"]["message"]


async def test_grpc_names_its_own_field(lone: LoneGateway) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="json_schema") as refused:
        await lone.inference.Generate(pb.GenerateRequest(model="m", prompt="x", json_schema="{"))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_only_the_pool_finds_out_names_the_field_too(lone: LoneGateway, pool: ScriptedPool) -> None:
    def refuse(sequence: SubmittedSequence) -> None:
        sequence.end("error", error_code="invalid", error_message="strayed", error_field="json_schema")

    pool.script = refuse
    response = await post(lone, **with_schema(SCHEMA))
    assert (response.status_code, response.json()["error"]["param"]) == (400, FIELD)


async def test_a_schema_without_end_is_given_up_and_the_next_one_is_read(
    byte_level: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schemas = SchemaCheck("m", byte_level, [0])
    await schemas.check(json.dumps(SCHEMA), FIELD)
    monkeypatch.setattr(schema_check, "CHECK_S", 0.3)
    endless = json.dumps({"type": "integer", "multipleOf": 999_983})
    for _ in range(2):  # the second time nobody tries
        with pytest.raises(YardError, match="more than 0 s or too much memory") as refused:
            await schemas.check(endless, FIELD)
        assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID, FIELD)
    monkeypatch.undo()
    await schemas.check('{"type": "boolean"}', FIELD)


@pytest.mark.parametrize(
    ("spec", "embed", "what"),
    [
        ({"source": "file:/m", "engine": "trtllm"}, False, "engine `trtllm`"),
        ({"source": "file:/m"}, True, "embeddings"),
        ({"source": "openai+http://10.0.0.1:8000/v1#m"}, False, "servers that run elsewhere"),
    ],
)
def test_what_cannot_hold_answers_to_a_schema_says_so(spec: dict[str, Any], embed: bool, what: str) -> None:
    names = {"json_schema": "response_format"}
    request = GenerationRequest("m", "id", json_schema="{}", embed=embed, names=names)
    with pytest.raises(YardError, match=f"response_format is not supported by {what}") as refused:
        check_constraint(request, ModelSpec.model_validate(spec))
    assert (refused.value.code, refused.value.field) == (ErrorCode.UNIMPLEMENTED, "response_format")
