"""OpenAI's HTTP surface with the official client."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
from lone_gateway import LoneGateway, ids_of
from scripted_pool import ScriptedPool, SubmittedSequence

from gateway.api.proto.pool_pb2 import Logprob


@pytest.fixture
async def client(lone: LoneGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{lone.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def answering(pool: ScriptedPool, ids: list[int], reason: str = "stop", stop_token_id: int = 2) -> None:
    """Each sequence gets the ids, one a frame."""

    def answer(sequence: SubmittedSequence) -> None:
        for token in ids:
            sequence.tokens([token])
        sequence.end(reason, stop_token_id=stop_token_id, completion_tokens=len(ids) + 1)

    pool.script = answer


async def test_chat(client: openai.AsyncOpenAI, pool: ScriptedPool, byte_level: Path) -> None:
    answering(pool, ids_of(byte_level, "Paris 😀."))
    seen: list[SubmittedSequence] = []
    answer, pool.script = pool.script, lambda sequence: (seen.append(sequence), answer(sequence))
    response = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": [{"type": "text", "text": "Capital of France?"}]}], seed=-1
    )
    assert response.choices[0].message.content == "Paris 😀."
    assert response.choices[0].finish_reason == "stop"
    assert response.object == "chat.completion"
    prompt = "<|im_start|>user\nCapital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert list(seen[0].submit.prompt_ids) == ids_of(byte_level, prompt)
    assert response.usage.prompt_tokens == len(ids_of(byte_level, prompt))
    assert response.usage.completion_tokens == len(ids_of(byte_level, "Paris 😀.")) + 1
    assert response.usage.total_tokens == response.usage.prompt_tokens + response.usage.completion_tokens


async def test_chat_stream_with_usage(client: openai.AsyncOpenAI, pool: ScriptedPool, byte_level: Path) -> None:
    """rule 17: no half character, and the usage that was asked for."""
    answering(pool, ids_of(byte_level, "naïve 😀 🎉"))
    stream = await client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        n=2,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        for choice in chunk.choices:
            assert "\ufffd" not in (choice.delta.content or "")
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "naïve 😀 🎉", 1: "naïve 😀 🎉"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {choice.finish_reason for chunk in chunks for choice in chunk.choices} == {None, "stop"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 2 * (len(ids_of(byte_level, "naïve 😀 🎉")) + 1)


async def test_completions_with_several_prompts(client: openai.AsyncOpenAI, pool: ScriptedPool, byte_level: Path) -> None:
    first, second = ids_of(byte_level, " Paris"), ids_of(byte_level, " the fox")

    def answer(sequence: SubmittedSequence) -> None:
        asked = list(sequence.submit.prompt_ids)
        sequence.end("length", tokens=first if asked == ids_of(byte_level, "one") else second)

    pool.script = answer
    response = await client.completions.create(model="m", prompt=["one", "two"], n=2, echo=True)
    assert [choice.text for choice in response.choices] == ["one Paris", "one Paris", "two the fox", "two the fox"]
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert response.choices[0].finish_reason == "length"
    stream = await client.completions.create(model="m", prompt=["one", ids_of(byte_level, "two")], stream=True)
    texts = {0: "", 1: ""}
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: " Paris", 1: " the fox"}


async def test_default_max_tokens(client: openai.AsyncOpenAI, pool: ScriptedPool) -> None:
    asked: list[int] = []
    pool.script = lambda sequence: (asked.append(sequence.submit.max_tokens), sequence.end("length"))
    await client.completions.create(model="m", prompt="one")
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=5)
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=6)
    assert asked == [16, 5, 6]


async def test_logprobs_in_both_formats(client: openai.AsyncOpenAI, pool: ScriptedPool, byte_level: Path) -> None:
    ids = ids_of(byte_level, " é")
    halves = ids_of(byte_level, "😀")

    def answer(sequence: SubmittedSequence) -> None:
        for token in ids + halves:
            logprob = Logprob(logprob=math.log(0.5), alternative_ids=[token, 5], alternative_logprobs=[math.log(0.5), -2.0])
            sequence.tokens([token], [logprob])
        sequence.end("length")

    pool.script = answer
    chat = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in content).decode() == " é😀"
    assert len(content) == len(ids + halves)
    assert all(token.logprob == pytest.approx(math.log(0.5)) for token in content)
    assert [len(token.top_logprobs) for token in content] == [2] * len(content)
    completion = await client.completions.create(model="m", prompt="one", logprobs=2)
    logprobs = completion.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == len(content)
    # The four tokens of the emoji are all at its place.
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset[-len(halves) :] == [2] * len(halves)
    streamed = []
    stream = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2, stream=True
    )
    async for chunk in stream:
        for choice in chunk.choices:
            streamed += choice.logprobs.content if choice.logprobs else []
    assert streamed == content


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tools": "f"}, "tools"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "long " * 500}]}, "messages"),
        ({"model": None}, "model"),
    ],
)
async def test_bad_requests_name_the_field(lone: LoneGateway, change: dict, param: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **change}
    async with httpx.AsyncClient() as client:
        response = await client.post(f"{lone.http}/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]


async def test_unknown_fields_are_ignored_and_bad_json_is_not(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    answering(pool, ids_of(byte_level, "yes"))
    async with httpx.AsyncClient() as client:
        url = f"{lone.http}/v1/completions"
        ok = await client.post(url, json={"model": "m", "prompt": "x", "user": "me", "from_the_future": {"a": 1}})
        bad = await client.post(url, content=b"{nope")
        nowhere = await client.get(f"{lone.http}/v2")
    assert ok.json()["choices"][0]["text"] == "yes"
    assert bad.status_code == 400
    assert bad.json()["error"]["type"] == "invalid_request_error"
    assert nowhere.status_code == 404
    assert "no such path" in nowhere.json()["error"]["message"]


async def test_unknown_model(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "model_not_found"
    assert "there are m" in caught.value.message


async def test_the_pool_is_full(client: openai.AsyncOpenAI, pool: ScriptedPool) -> None:
    """A refusal before the first token is a status of its own, also for a stream."""
    pool.script = lambda sequence: sequence.fail("exhausted", "the queue of `m` is full", 2500)
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="m", prompt="x", stream=stream)
        assert caught.value.response.headers["retry-after"] == "3"
        assert caught.value.code == "rate_limit_exceeded"


async def test_failure_in_mid_stream(client: openai.AsyncOpenAI, pool: ScriptedPool, byte_level: Path) -> None:
    def answer(sequence: SubmittedSequence) -> None:
        sequence.tokens(ids_of(byte_level, "yes"))
        sequence.fail("unavailable", "rank 1 was lost")

    pool.script = answer
    stream = await client.completions.create(model="m", prompt="x", stream=True)
    assert (await anext(stream)).choices[0].text == "yes"
    with pytest.raises(openai.APIError, match="rank 1 was lost"):
        await anext(stream)


async def test_headers(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    """rule 12: without Redis the last snapshot serves, and answers say so."""
    answering(pool, ids_of(byte_level, "yes"))
    lone.put("Route", "chat", {"targets": [{"model": "m"}], "aliases": ["assistant"]})
    async with httpx.AsyncClient() as client:
        body = {"model": "assistant", "prompt": "x"}
        response = await client.post(f"{lone.http}/v1/completions", json=body, headers={"x-request-id": "mine"})
        assert response.headers["x-request-id"] == "mine"
        assert response.json()["id"] == "cmpl-mine"
        assert response.headers["x-modelyard-model"] == response.json()["model"] == "m"
        assert response.headers["x-modelyard-route"] == "chat"
        assert response.headers["x-modelyard-route-generation"] == "1"
        assert "x-modelyard-degraded" not in response.headers
        lone.view.set_degraded("Redis does not answer")
        response = await client.post(f"{lone.http}/v1/completions", json=body)
        assert response.headers["x-modelyard-degraded"] == "true"
        health = (await client.get(f"{lone.http}/health")).json()
        assert (health["status"], health["reason"]) == ("degraded", "Redis does not answer")


async def test_models(client: openai.AsyncOpenAI, lone: LoneGateway) -> None:
    lone.put("Route", "chat", {"targets": [{"model": "m"}]})
    models = [model.id async for model in client.models.list()]
    assert models == ["chat", "m"]
    assert (await client.models.retrieve("m")).created == 1_700_000_000
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nope")


async def test_ready_and_metrics(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    """rule 16: names that no model has count as `other`."""
    answering(pool, ids_of(byte_level, "yes"))
    async with httpx.AsyncClient() as client:
        for model in ("m", "made-up-1", "made-up-2"):
            await client.post(f"{lone.http}/v1/completions", json={"model": model, "prompt": "x"})
        text = (await client.get(f"{lone.http}/metrics")).text
        assert 'modelyard_requests_total{code="ok",route="m",surface="http"} 1.0' in text
        assert 'modelyard_requests_total{code="not_found",route="other",surface="http"} 2.0' in text
        assert "made-up" not in text
        assert (await client.get(f"{lone.http}/ready")).status_code == 200
        lone.health.set_accepting(False)
        assert (await client.get(f"{lone.http}/ready")).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_client_gone_over_http(lone: LoneGateway, pool: ScriptedPool, byte_level: Path, stream: bool, begun: bool) -> None:
    """rule 10: a client that left is cancelled, also before the first token and when it did not stream."""
    async with httpx.AsyncClient() as client:
        body = {"model": "m", "prompt": "x", "stream": stream}
        call = asyncio.create_task(client.post(f"{lone.http}/v1/completions", json=body))
        sequence = await pool.next()
        if begun:
            sequence.tokens(ids_of(byte_level, "yes"))
            await asyncio.sleep(0)
        call.cancel()
        async with asyncio.timeout(2):
            await sequence.cancelled.wait()
    assert lone.links.in_flight == 0


async def test_deadline_header(lone: LoneGateway, pool: ScriptedPool) -> None:
    async with httpx.AsyncClient() as client:
        headers = {"x-modelyard-timeout-ms": "200"}
        response = await client.post(f"{lone.http}/v1/completions", json={"model": "m", "prompt": "x"}, headers=headers)
    assert response.status_code == 504
    sequence = await pool.next()
    assert 0 < sequence.submit.timeout_ms <= 200
    async with asyncio.timeout(2):
        await sequence.cancelled.wait()
