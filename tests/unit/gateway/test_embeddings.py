"""/v1/embeddings and Embed, through the path of every request."""

from __future__ import annotations

import base64
from array import array

import grpc
import httpx
import pytest
from lone_gateway import LoneGateway
from scripted_pool import ScriptedPool, SubmittedSequence

from gateway.api.proto import inference_pb2 as pb


@pytest.fixture
async def embedding(lone: LoneGateway, pool: ScriptedPool) -> ScriptedPool:
    """Model `m` makes embeddings: of each text (its length, 0.5)."""
    lone.embedding.add("m")
    lone.put_model("m")  # its text is read again

    def script(sequence: SubmittedSequence) -> None:
        sequence.embedding([len(sequence.submit.prompt_ids), 0.5])

    pool.script = script
    return pool


async def post(lone: LoneGateway, path: str = "embeddings", **body: object) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(f"{lone.http}/v1/{path}", json={"model": "m", **body}, timeout=10)


async def test_over_http(lone: LoneGateway, embedding: ScriptedPool) -> None:
    found = (await post(lone, input=["abc", "a", [5, 6]])).json()
    assert [(entry["index"], entry["embedding"]) for entry in found["data"]] == [(0, [3, 0.5]), (1, [1, 0.5]), (2, [2, 0.5])]
    assert found["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    encoded = (await post(lone, input="ab", encoding_format="base64")).json()["data"][0]["embedding"]
    assert array("f", base64.b64decode(encoded)).tolist() == [2, 0.5]


async def test_over_grpc(lone: LoneGateway, embedding: ScriptedPool) -> None:
    found = await lone.inference.Embed(pb.EmbedRequest(model="m", texts=["abc", "a"]), timeout=10)
    assert [list(entry.values) for entry in found.embeddings] == [[3, 0.5], [1, 0.5]]
    assert (found.model, found.usage.prompt_tokens) == ("m", 4)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await lone.inference.Embed(pb.EmbedRequest(model="m"), timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_models_are_asked_for_what_they_do(lone: LoneGateway, embedding: ScriptedPool) -> None:
    refused = await post(lone, "completions", prompt="x")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    lone.embedding.clear()
    lone.put_model("m")
    assert "makes no embeddings" in (await post(lone, input="x")).json()["error"]["message"]


@pytest.mark.parametrize("body", [{}, {"input": []}, {"input": "x", "dimensions": 3}, {"input": "x", "encoding_format": "int8"}])
async def test_what_is_refused(lone: LoneGateway, embedding: ScriptedPool, body: dict) -> None:
    assert (await post(lone, **body)).status_code == 400
