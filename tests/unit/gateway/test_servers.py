"""Models whose servers run elsewhere, over OpenAI's HTTP: a whole gateway in front of a stand-in for `trtllm-serve`."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from lone_gateway import LoneGateway, ids_of, until
from scripted_pool import ScriptedPool
from standin_trtllm_serve import TrtllmServe
from test_security import authority, certificate

from gateway.api.proto import inference_pb2 as pb
from gateway.link.server_events import EventReader

HELLO = [{"role": "user", "content": "Capital of France?"}]


@pytest.fixture
async def server() -> AsyncIterator[TrtllmServe]:
    server = await TrtllmServe().start()
    yield server
    await server.stop()


@pytest.fixture
async def site(lone: LoneGateway, server: TrtllmServe) -> LoneGateway:
    """The gateway of `lone`, with a model `far` of the server beside its own `m`."""
    lone.put("Model", "far", {"source": server.source})
    await until(lambda: lone.links.serving("far"))
    return lone


@pytest.fixture
async def client(site: LoneGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{site.http}/v1", api_key="none", max_retries=0) as client:
        yield client


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def ask(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"model": "far", "prompt": "The capital is", **fields})


async def test_messages_and_answers_pass_as_text(client: openai.AsyncOpenAI, server: TrtllmServe) -> None:
    answer = await client.chat.completions.create(model="far", messages=HELLO, temperature=0.5, seed=7, max_tokens=9)
    assert answer.choices[0].message.content == "Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, 4)
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    asked = await server.next()
    assert asked.path == "/v1/chat/completions"
    assert asked.body == {
        "model": "llama-70b",
        "messages": HELLO,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "seed": 7,
        "max_tokens": 9,
    }


async def test_a_stream_with_its_usage(client: openai.AsyncOpenAI, server: TrtllmServe) -> None:
    """Rule 17."""
    server.pieces = ["naïve ", "😀", " 你好"]
    stream = await client.chat.completions.create(
        model="far", messages=HELLO, stream=True, max_tokens=2, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "naïve 😀"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 3


async def test_generate_takes_text_and_says_what_token_ids_need(site: LoneGateway, server: TrtllmServe) -> None:
    response = await site.inference.Generate(ask(n=2), timeout=10)
    assert [choice.text for choice in response.choices] == ["Paris.", "Paris."]
    assert (await server.next()).body["prompt"] == "The capital is"
    for fields, named in (
        ({"prompt": None, "prompt_ids": pb.TokenIds(ids=[1, 2])}, "spec.tokenizer"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"logprobs": 1}, "logprobs"),
    ):
        error = await refused(site.inference.Generate(ask(**fields), timeout=10))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert named in error.details()
    error = await refused(site.inference.Tokenize(pb.TokenizeRequest(model="far", text="x"), timeout=10))
    assert (error.code(), "spec.tokenizer" in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_with_a_tokenizer_it_is_sent_token_ids(lone: LoneGateway, server: TrtllmServe, byte_level: Path) -> None:
    lone.put("Model", "far", {"source": server.source, "tokenizer": str(byte_level), "context": 64})
    await until(lambda: lone.links.serving("far"))
    ids = ids_of(byte_level, "The capital")
    response = await lone.inference.Generate(ask(prompt=None, prompt_ids=pb.TokenIds(ids=ids)), timeout=10)
    assert response.choices[0].text == "Paris."
    asked = await server.next()
    assert (asked.path, asked.body["prompt"], asked.body["max_tokens"]) == ("/v1/completions", ids, 64 - len(ids))
    await lone.inference.Chat(pb.ChatRequest(model="far", messages=[pb.Message(role="user", content="hi")]), timeout=10)
    assert (await server.next()).body["prompt"] == ids_of(byte_level, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_a_quota_pays_for_the_prompt_that_the_server_counted(site: LoneGateway) -> None:
    class Account:
        def __init__(self) -> None:
            self.taken: list[int] = []

        async def admit(self, caller: object, prompt_tokens: int) -> None:
            self.taken.append(prompt_tokens)

        def charge(self, caller: object, tokens: int) -> None:
            self.taken.append(tokens)

        def give_back(self, caller: object, prompt_tokens: int) -> None:
            self.taken.append(-prompt_tokens)

    account = site.path.quotas = Account()  # type: ignore[assignment]
    await site.inference.Generate(ask(prompt="x" * 60), timeout=10)
    guessed, rest = account.taken
    assert (guessed, guessed + rest) == (15, 11 + 4)


async def test_stop_strings(site: LoneGateway, server: TrtllmServe) -> None:
    """Rule 17: a server that leaves them in the text is cut here; one that does not says which it was."""
    server.pieces = ["one ST", "OP", " two"]
    server.hold_after = 2
    response = await site.inference.Generate(ask(stop=["STOP"]), timeout=10)
    assert (response.choices[0].text, response.choices[0].stop_reason) == ("one ", "STOP")
    asked = await server.next()
    assert asked.body["stop"] == ["STOP"]
    async with asyncio.timeout(5):
        await asked.cancelled.wait()
    server.pieces, server.finish, server.hold_after = ["one "], ("stop", "STOP"), None
    response = await site.inference.Generate(ask(stop=["STOP"]), timeout=10)
    assert (response.choices[0].text, response.choices[0].stop_reason) == ("one ", "STOP")


@pytest.mark.parametrize("pieces", [0, 1])
async def test_who_leaves_is_cancelled_there(site: LoneGateway, server: TrtllmServe, pieces: int) -> None:
    """Rule 10, before the first token and after it."""
    server.hold_after = pieces
    call = site.inference.GenerateStream(ask())
    asked = await server.next()
    if pieces:
        assert (await call.read()).choices[0].text == "Par"
    call.cancel()
    async with asyncio.timeout(5):
        await asked.cancelled.wait()
    await until(lambda: site.links.in_flight == 0)


async def test_a_deadline_ends_it_there(site: LoneGateway, server: TrtllmServe) -> None:
    server.hold_after = 1
    error = await refused(site.inference.Generate(ask(), timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(5):
        await (await server.next()).cancelled.wait()


@pytest.mark.parametrize(
    ("status", "headers", "code", "retry_after"),
    [
        (429, {"retry-after": "7"}, grpc.StatusCode.RESOURCE_EXHAUSTED, "7000"),
        (400, {}, grpc.StatusCode.INVALID_ARGUMENT, None),
        (503, {"retry-after": "3"}, grpc.StatusCode.UNAVAILABLE, "3000"),
        (401, {}, grpc.StatusCode.UNAVAILABLE, "1000"),
        (500, {}, grpc.StatusCode.INTERNAL, None),
    ],
)
async def test_what_it_refuses_is_said_as_ours(
    site: LoneGateway, server: TrtllmServe, status: int, headers: dict, code: grpc.StatusCode, retry_after: str | None
) -> None:
    server.refusal = (status, {"object": "error", "message": "too long by far"}, headers)
    error = await refused(site.inference.Generate(ask(), timeout=10))
    assert error.code() is code
    assert f"said {status}: too long by far" in error.details()
    assert dict(error.trailing_metadata() or ()).get("retry-after-ms") == retry_after


async def test_an_answer_that_breaks_off_is_an_error(site: LoneGateway, server: TrtllmServe) -> None:
    """Rule 9: nothing is tried again after the first token."""
    server.break_off = True
    error = await refused(site.inference.Generate(ask(), timeout=10))
    assert (error.code(), "broke its answer off" in error.details()) == (grpc.StatusCode.UNAVAILABLE, True)
    assert server.asked.qsize() == 1


async def test_a_server_that_is_down_leaves_the_route_and_comes_back(
    site: LoneGateway, server: TrtllmServe, pool: ScriptedPool
) -> None:
    """Rule 9: who meets it first is answered elsewhere."""
    pool.script = lambda sequence: sequence.end("length", tokens=[5], completion_tokens=1)
    site.put("Route", "chat", {"targets": [{"model": "far"}], "fallback": ["m"]})
    site.links.server("far")._look_now.clear()
    await server.stop()
    response = await site.inference.Generate(ask(model="chat"), timeout=10)
    assert response.model == "m"
    assert not site.links.serving("far")
    error = await refused(site.inference.Generate(ask(), timeout=10))
    assert (error.code(), "cannot be reached" in error.details()) == (grpc.StatusCode.UNAVAILABLE, True)
    (record,) = site.links.servers()
    assert (record.model, record.state) == ("far", "failed")
    assert record.reason.endswith("cannot be reached: Connection refused")
    await server.start()
    await until(lambda: site.links.serving("far"))
    assert (await site.inference.Generate(ask(model="chat"), timeout=10)).model == "far"


async def test_a_server_that_is_silent_leaves_until_it_answers(lone: LoneGateway, server: TrtllmServe) -> None:
    """Rule 11."""
    lone.put("Model", "far", {"source": server.source, "server": {"silent_s": 0.2}})
    await until(lambda: lone.links.serving("far"))
    server.hold_after = 1
    call = lone.inference.GenerateStream(ask())
    assert (await call.read()).choices[0].text == "Par"
    asked = await server.next()
    error = await refused(call.read())
    assert (error.code(), "nothing was heard" in error.details()) == (grpc.StatusCode.UNAVAILABLE, True)
    async with asyncio.timeout(5):
        await asked.cancelled.wait()
    assert (await server.next()).body["max_tokens"] == 1  # the probe
    await until(lambda: lone.links.rotation("far"))


async def test_a_server_that_reasons_is_not_silent(lone: LoneGateway, server: TrtllmServe) -> None:
    """Rule 11: health is forward progress, also of what is not shown."""
    server.reasons = 8
    lone.put("Model", "far", {"source": server.source, "server": {"silent_s": 0.4}})
    await until(lambda: lone.links.serving("far"))
    request = pb.ChatRequest(model="far", messages=[pb.Message(role="user", content="hi")])
    assert (await lone.inference.Chat(request, timeout=10)).choices[0].text == "Paris."
    assert lone.links.rotation("far")


async def test_another_name_than_the_server_has_is_said(lone: LoneGateway, server: TrtllmServe) -> None:
    lone.put("Model", "far", {"source": server.source.replace("#llama-70b", "#llama-8b")})
    link = lone.links.server("far")
    await until(lambda: "llama-70b" in link.reason)
    error = await refused(lone.inference.Generate(ask(), timeout=10))
    assert "serves llama-70b, not `llama-8b`" in error.details()


async def test_tls_and_a_key(lone: LoneGateway, tmp_path: Path) -> None:
    authority(tmp_path, "ca")
    cert, key = certificate(tmp_path, "server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    server = await TrtllmServe(tls=context, key="sesame").start()
    secret = tmp_path / "secret"
    secret.write_text("wrong\n")
    try:
        lone.put("Model", "far", {"source": server.source, "server": {"ca": str(tmp_path / "ca.pem"), "key_file": str(secret)}})
        link = lone.links.server("far")
        await until(lambda: "said 401" in link.reason)
        assert "wrong\n" not in link.reason
        secret.write_text("sesame\n")
        await until(lambda: lone.links.serving("far"))
        assert (await lone.inference.Generate(ask(), timeout=10)).choices[0].text == "Paris."
        lone.put("Model", "far", {"source": server.source})  # whose authority nobody here knows
        await until(lambda: "certificate" in lone.links.server("far").reason.lower())
    finally:
        await server.stop()


async def test_a_changed_source_is_followed_while_the_old_one_finishes(site: LoneGateway, server: TrtllmServe) -> None:
    server.hold_after = 1
    call = site.inference.GenerateStream(ask())
    assert (await call.read()).choices[0].text == "Par"
    other = await TrtllmServe("other").start()
    try:
        site.put("Model", "far", {"source": other.source})
        await until(lambda: site.links.serving("far"))
        await site.inference.Generate(ask(), timeout=10)
        assert (await other.next()).body["model"] == "other"
        server.go_on.set()
        rest = ""
        while (chunk := await call.read()) is not grpc.aio.EOF:
            rest += chunk.choices[0].text
        assert rest == "is."
        site.delete("Model", "far")
        assert site.links.servers() == ()
    finally:
        await other.stop()


async def test_health_and_models_show_it(site: LoneGateway, server: TrtllmServe) -> None:
    async with httpx.AsyncClient(base_url=site.http) as http:
        assert "far" in {item["id"] for item in (await http.get("/v1/models")).json()["data"]}
        assert site.health.serves("far")
        assert 'modelyard_server_up{model="far"} 1.0' in (await http.get("/metrics")).text
        await server.stop()
        await refused(site.inference.Generate(ask(), timeout=10))  # who meets it first takes it out
        await until(lambda: not site.health.serves("far"))
        assert 'modelyard_server_up{model="far"} 0.0' in (await http.get("/metrics")).text
        (waiting,) = (await http.get("/capacity.json")).json()["waiting"]
        assert (waiting["what"], waiting["where"]) == ("model far", "elsewhere")
        assert "localhost" in waiting["why"]


async def test_a_gateway_can_be_the_server(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    """An OpenAI server that is no stand-in: this gateway's own HTTP."""
    ids = ids_of(byte_level, " Paris. naïve 😀")
    lone.put("Model", "far", {"source": f"openai+{lone.http}/v1#m"})
    await until(lambda: lone.links.serving("far"))
    call = lone.inference.GenerateStream(ask(max_tokens=64, stop=["ZZ"], sampling=pb.Sampling(top_k=5, seed=3)))
    sequence = await pool.next()
    assert (sequence.submit.max_tokens, sequence.submit.sampling.top_k, sequence.submit.sampling.seed) == (64, 5, 3)
    for token in ids:
        sequence.tokens([token])
    sequence.end("stop", stop_token_id=2, completion_tokens=len(ids) + 1, cached_tokens=1)
    chunks = [chunk async for chunk in call]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == " Paris. naïve 😀"
    usage = chunks[-1].usage
    prompt = len(ids_of(byte_level, "The capital is"))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (prompt, len(ids) + 1, 1)
    call = lone.inference.GenerateStream(ask(max_tokens=64))
    sequence = await pool.next()
    sequence.tokens([ids[0]])
    await call.read()
    call.cancel()
    async with asyncio.timeout(5):
        await sequence.cancelled.wait()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_may_come_in_pieces_of_any_size(size: int) -> None:
    raw = ': a comment\r\ndata: {"a": "é"}\r\n\r\nevent: x\ndata: one\ndata: two\n\n\ndata: [DONE]\n\n'.encode()
    reader = EventReader()
    found = [data for start in range(0, len(raw), size) for data in reader.feed(raw[start : start + size])]
    assert found == ['{"a": "é"}'.encode(), b"one\ntwo", b"[DONE]"]
