"""modelyard.v1.Inference against a pool that does what the test says. The client is built from the published .proto."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import grpc
import pytest
from grpc_tools import protoc
from lone_gateway import LoneGateway, ids_of, until
from scripted_pool import ScriptedPool, SubmittedSequence

from gateway.api.proto import inference_pb2 as pb
from gateway.api.proto.pool_pb2 import Logprob

ANSWER = " Paris. naïve 😀"
FINISH = pb.FinishReason


def request(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"model": "m", "prompt": "The capital of France is", **fields})


def one_by_one(pool: ScriptedPool, ids: list[int], reason: str = "length", **end: int) -> None:
    def answer(sequence: SubmittedSequence) -> None:
        for token in ids:
            sequence.tokens([token])
        sequence.end(reason, completion_tokens=len(ids), **end)

    pool.script = answer


async def refused(call: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def trailing(error: grpc.aio.AioRpcError) -> dict[str, str]:
    return dict(error.trailing_metadata() or ())


# ---------------------------------------------------------------- answers


async def test_a_whole_answer(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    ids = ids_of(byte_level, ANSWER)
    pool.script = lambda sequence: sequence.end("length", tokens=ids, completion_tokens=len(ids), cached_tokens=2)
    call = lone.inference.Generate(request(max_tokens=64, request_id="mine"), timeout=10)
    response = await call
    assert response.choices[0].text == ANSWER
    assert response.choices[0].finish_reason == FINISH.FINISH_REASON_LENGTH
    assert (response.model, response.request_id) == ("m", "mine")
    assert response.usage.prompt_tokens == len(ids_of(byte_level, "The capital of France is"))
    assert response.usage.completion_tokens == len(ids)
    assert response.usage.cached_tokens == 2
    metadata = dict(await call.initial_metadata())
    assert (metadata["modelyard-model"], metadata["modelyard-route-generation"]) == ("m", "1")
    assert "modelyard-degraded" not in metadata


async def test_what_the_pool_is_sent(lone: LoneGateway, pool: ScriptedPool) -> None:
    await until(lambda: lone.library.loaded("m"))
    text = lone.library.loaded("m")
    assert text is not None
    text.defaults.update(temperature=0.6, top_k=40)
    sampling = pb.Sampling(top_p=0.5, seed=2**64 - 1)
    call = lone.inference.Generate(request(n=2, max_tokens=9, sampling=sampling, stop_token_ids=[7], logprobs=3), timeout=30)
    call = asyncio.ensure_future(call)
    first, second = (await pool.next()).submit, (await pool.next()).submit
    assert first.model == "m"
    assert first.max_tokens == 9
    assert list(first.stop_token_ids) == [7]
    assert 25_000 < first.timeout_ms <= 30_500  # gRPC sends deadlines to three digits, rounded up
    assert first.sampling.temperature == pytest.approx(0.6)  # the model's own default
    assert (first.sampling.top_k, first.sampling.top_p, first.sampling.repetition_penalty) == (40, 0.5, 1.0)
    assert (first.sampling.logprobs, first.sampling.seed, second.sampling.seed) == (3, 2**64 - 1, 0)
    assert pool.frames_up == 2  # the greeting, and both sequences in one frame
    call.cancel()


async def test_a_stream(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    """rule 17: no chunk has half a character, and the last has the usage."""
    ids = ids_of(byte_level, ANSWER)
    one_by_one(pool, ids, "stop", stop_token_id=2)
    chunks = [chunk async for chunk in lone.inference.GenerateStream(request(return_token_ids=True), timeout=10)]
    texts = [choice.text for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == ANSWER
    assert not any("\ufffd" in text for text in texts)
    assert [token for chunk in chunks for choice in chunk.choices for token in choice.token_ids] == ids
    assert chunks[-1].choices[0].finish_reason == FINISH.FINISH_REASON_STOP
    assert chunks[-1].choices[0].stop_reason == "2"
    assert chunks[-1].usage.completion_tokens == len(ids)
    assert not any(chunk.HasField("usage") for chunk in chunks[:-1])


async def test_chat_goes_through_the_template(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    call = pb.ChatRequest(model="m", messages=[pb.Message(role="user", content="Hello")])
    answer = asyncio.ensure_future(lone.inference.Chat(call, timeout=10))
    sequence = await pool.next()
    assert list(sequence.submit.prompt_ids) == ids_of(byte_level, "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert sequence.submit.max_tokens == 256 - len(sequence.submit.prompt_ids)
    sequence.end("stop", tokens=ids_of(byte_level, "world"))
    assert (await answer).choices[0].text == "world"


async def test_several_choices_are_merged(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    stream = lone.inference.GenerateStream(request(n=3), timeout=10)
    sequences = [await pool.next() for _ in range(3)]
    for sequence, text in zip(reversed(sequences), ("three", "two", "one"), strict=True):
        sequence.tokens(ids_of(byte_level, text))
        sequence.end("length", completion_tokens=5)
    texts = {0: "", 1: "", 2: ""}
    usages = []
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        if chunk.HasField("usage"):
            usages.append(chunk.usage)
    assert texts == {0: "one", 1: "two", 2: "three"}
    assert [usage.completion_tokens for usage in usages] == [15]
    assert usages[0].prompt_tokens == len(ids_of(byte_level, "The capital of France is"))


async def test_a_stop_string_across_tokens(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    """rule 17: no part of a stop string comes out; the sequence is stopped in the pool; usage counts what was generated."""
    ids = ids_of(byte_level, "one two ST") + ids_of(byte_level, "OP three")
    stream = lone.inference.GenerateStream(request(stop=["STOP", "never"], return_token_ids=True), timeout=10)
    sequence = await pool.next()
    for token in ids:
        sequence.tokens([token])
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == "one two "
    last = chunks[-1].choices[0]
    assert (last.finish_reason, last.stop_reason) == (FINISH.FINISH_REASON_STOP, "STOP")
    shown = [token for chunk in chunks for choice in chunk.choices for token in choice.token_ids]
    assert shown == ids[: len(shown)]
    assert len(shown) < chunks[-1].usage.completion_tokens <= len(ids)
    async with asyncio.timeout(5):
        await sequence.cancelled.wait()


async def test_an_almost_stop_string_is_not_lost(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    one_by_one(pool, ids_of(byte_level, "one STO"))
    response = await lone.inference.Generate(request(stop=["STOP"]), timeout=10)
    assert response.choices[0].text == "one STO"


async def test_stop_tokens_are_no_text(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    """Whether or not the engine sends the token that ended it."""
    ids = ids_of(byte_level, "one")
    stop = ids_of(byte_level, ".")[0]
    for sent in (ids, [*ids, stop]):
        one_by_one(pool, sent, "stop", stop_token_id=stop)
        response = await lone.inference.Generate(request(stop_token_ids=[stop], return_token_ids=True), timeout=10)
        choice = response.choices[0]
        assert (choice.text, choice.stop_reason, list(choice.token_ids)) == ("one", str(stop), ids)


async def test_logprobs(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    ids = ids_of(byte_level, "é😀")
    logprobs = [Logprob(logprob=-0.5, alternative_ids=[token, 9], alternative_logprobs=[-0.5, -3.0]) for token in ids]

    def answer(sequence: SubmittedSequence) -> None:
        sequence.tokens(ids[:3], logprobs[:3])
        sequence.tokens(ids[3:], logprobs[3:])
        sequence.end("length")

    pool.script = answer
    response = await lone.inference.Generate(request(logprobs=2), timeout=10)
    given = response.choices[0].logprobs
    assert [entry.token_id for entry in given] == ids
    assert b"".join(entry.raw for entry in given).decode() == "é😀"
    assert [round(one.logprob, 3) for one in given[0].alternatives] == [-0.5, -3.0]
    assert list(response.choices[0].token_ids) == []  # not asked for


async def test_prompt_ids_and_tokenize(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    tokenized = await lone.inference.Tokenize(pb.TokenizeRequest(model="m", text="The capital 😀"), timeout=10)
    assert list(tokenized.ids) == ids_of(byte_level, "The capital 😀")
    assert len(tokenized.tokens) == len(tokenized.ids)
    assert tokenized.max_context == 256
    answer = asyncio.ensure_future(lone.inference.Generate(request(prompt_ids=pb.TokenIds(ids=tokenized.ids)), timeout=10))
    sequence = await pool.next()
    assert list(sequence.submit.prompt_ids) == list(tokenized.ids)
    sequence.end("length")
    await answer
    text = await lone.inference.Detokenize(pb.DetokenizeRequest(model="m", ids=tokenized.ids), timeout=10)
    assert text.text == "The capital 😀"


async def test_held_requests_say_so(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    stream = lone.inference.GenerateStream(request(), timeout=10)
    sequence = await pool.next()
    sequence.hold("m is being woken", 120)
    chunks = aiter(stream)
    first = await anext(chunks)
    assert (first.held.reason, first.held.estimated_wait_ms) == ("m is being woken", 120)
    sequence.end("length", tokens=ids_of(byte_level, "yes"))
    assert (await anext(chunks)).choices[0].text == "yes"


async def test_list_models(lone: LoneGateway) -> None:
    lone.put("Route", "chat", {"targets": [{"model": "m"}]})
    models = (await lone.inference.ListModels(pb.ListModelsRequest(), timeout=10)).models
    assert [(info.name, info.kind, info.ready, info.max_context, list(info.targets)) for info in models] == [
        ("chat", "route", True, 256, ["m"]),
        ("m", "model", True, 256, []),
    ]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": ""}, "model"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "long " * 500}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 255}, "max_tokens"),
        ({"n": 17}, "n"),
        ({"request_id": "two\nlines"}, "request_id"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [99_999]}, "stop_token_ids"),
        ({"prompt_ids": pb.TokenIds(ids=[1, 99_999])}, "prompt_ids"),
        ({"prompt_ids": pb.TokenIds()}, "prompt"),
        ({"sampling": pb.Sampling(temperature=-1)}, "temperature"),
        ({"sampling": pb.Sampling(temperature=float("nan"))}, "temperature"),
        ({"sampling": pb.Sampling(top_p=0)}, "top_p"),
        ({"sampling": pb.Sampling(top_p=1.5)}, "top_p"),
        ({"sampling": pb.Sampling(min_p=-0.1)}, "min_p"),
        ({"sampling": pb.Sampling(repetition_penalty=0)}, "repetition_penalty"),
        ({"sampling": pb.Sampling(frequency_penalty=3)}, "frequency_penalty"),
    ],
)
async def test_bad_requests_name_the_field(lone: LoneGateway, pool: ScriptedPool, change: dict, field: str) -> None:
    error = await refused(lone.inference.Generate(request(**change), timeout=10))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert trailing(error)["modelyard-field"] == field
    assert error.details()
    assert pool.idle()


async def test_bad_conversations(lone: LoneGateway) -> None:
    for messages, field in (([], "messages"), ([pb.Message(content="x")], "messages.role")):
        error = await refused(lone.inference.Chat(pb.ChatRequest(model="m", messages=messages), timeout=10))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert trailing(error)["modelyard-field"] == field


async def test_unknown_model(lone: LoneGateway) -> None:
    error = await refused(lone.inference.Generate(request(model="nope"), timeout=10))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "there are m" in error.details()


async def test_a_model_that_is_loading(lone: LoneGateway, byte_level: Path) -> None:
    """Rule 6: it is asked where the model is on its way, and the caller knows how long it will wait."""
    lone.texts["n"] = lone.texts["m"]
    lone.put("Model", "n", {"source": "file:x"})
    other = ScriptedPool("b", ["n"])
    await other.start()
    lone.observe(other, state="loading")
    stream = lone.inference.GenerateStream(request(model="n"), timeout=20)
    sequence = await other.next()
    sequence.hold("model `n` is loading", 1500)
    assert (await stream.read()).held.estimated_wait_ms == 1500
    assert dict(await stream.initial_metadata())["modelyard-estimated-wait-ms"] == "1500"
    sequence.end("length", tokens=ids_of(byte_level, "yes"))
    assert (await stream.read()).choices[0].text == "yes"
    lone.observe(other, state="failed")
    error = await refused(lone.inference.Generate(request(model="n"), timeout=10))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "failed in pool `b`" in error.details()
    assert int(trailing(error)["retry-after-ms"]) > 0


async def test_the_queue_is_full(lone: LoneGateway, pool: ScriptedPool) -> None:
    pool.script = lambda sequence: sequence.fail("exhausted", "the queue of `m` is full", 1500)
    error = await refused(lone.inference.Generate(request(), timeout=10))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert trailing(error)["retry-after-ms"] == "1500"


async def test_degraded(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    """rule 12: known routes keep serving without Redis, and every answer and error says so."""
    lone.view.set_degraded("Redis does not answer")
    one_by_one(pool, ids_of(byte_level, "yes"))
    call = lone.inference.Generate(request(), timeout=10)
    assert (await call).choices[0].text == "yes"
    assert dict(await call.trailing_metadata())["modelyard-degraded"] == "true"
    error = await refused(lone.inference.Generate(request(model="nope"), timeout=10))
    assert trailing(error)["modelyard-degraded"] == "true"


# ---------------------------------------------------------------- leaving and deadlines


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize("begun", [False, True])
async def test_client_gone(lone: LoneGateway, pool: ScriptedPool, byte_level: Path, method: str, begun: bool) -> None:
    """rule 10: a client that left is cancelled within a step, also before the first token."""
    call = getattr(lone.inference, method)(request(n=2), timeout=30)
    first, second = await pool.next(), await pool.next()
    if begun:
        first.tokens(ids_of(byte_level, "yes"))
        if method == "GenerateStream":
            await call.read()
    call.cancel()
    async with asyncio.timeout(2):
        await first.cancelled.wait()
        await second.cancelled.wait()
    assert lone.links.in_flight == 0


async def test_all_clients_of_a_connection_gone(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    """rule 10, for the case that handler cancellation alone misses: a connection with many streams closes."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{lone.servers.grpc_port}") as channel:
        method = channel.unary_stream(
            "/modelyard.v1.Inference/GenerateStream",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateChunk.FromString,
        )
        calls = [method(request()) for _ in range(50)]
        sequences = [await pool.next() for _ in calls]
        for sequence in sequences[::2]:
            sequence.tokens(ids_of(byte_level, "yes"))
    async with asyncio.timeout(5):
        for sequence in sequences:
            await sequence.cancelled.wait()
    assert lone.links.in_flight == 0


async def test_deadline_while_generating(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    """rule 10: the sequences end with the deadline, and the pool knew it."""
    error = asyncio.ensure_future(refused(lone.inference.Generate(request(), timeout=0.3)))
    sequence = await pool.next()
    assert 0 < sequence.submit.timeout_ms <= 300
    assert (await error).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(2):
        await sequence.cancelled.wait()


async def test_deadline_before_a_pool_is_there(lone: LoneGateway, pool: ScriptedPool) -> None:
    """rule 10: a deadline that expired in a queue never reaches an engine."""
    await pool.stop()
    await lone.wait_up("a", False)
    error = await refused(lone.inference.Generate(request(), timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await pool.start()
    await lone.wait_up("a")
    assert pool.idle()


# ---------------------------------------------------------------- replicas that fail


async def test_another_replica_before_the_first_token(
    lone: LoneGateway, pool: ScriptedPool, other: ScriptedPool, byte_level: Path
) -> None:
    """rule 9: before the first token a request is retried once on another replica, and its client sees nothing of it."""
    lone.observe(other, m=1_000)
    answer = asyncio.ensure_future(lone.inference.Generate(request(n=2), timeout=20))
    await pool.next()
    await pool.next()
    await pool.stop()
    for _ in range(2):
        (await other.next()).end("length", tokens=ids_of(byte_level, "yes"))
    assert [choice.text for choice in (await answer).choices] == ["yes", "yes"]


async def test_the_same_replica_when_it_is_back(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    """rule 9, with one replica: the retry waits for the link to come back."""
    answer = asyncio.ensure_future(lone.inference.Generate(request(), timeout=20))
    await pool.next()
    pool.drop_links()
    (await pool.next()).end("length", tokens=ids_of(byte_level, "yes"))
    assert (await answer).choices[0].text == "yes"


async def test_a_driver_that_restarts(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    """Its heartbeat expires on the way. Requests that come meanwhile wait for it, for a bounded time."""
    await pool.stop()
    lone.forget(pool)
    answer = asyncio.ensure_future(lone.inference.Generate(request(), timeout=20))
    done, _ = await asyncio.wait([answer], timeout=0.3)
    assert not done
    await pool.start()
    lone.observe(pool, state="loading")
    lone.observe(pool)
    (await pool.next()).end("length", tokens=ids_of(byte_level, "yes"))
    assert (await answer).choices[0].text == "yes"


async def test_a_model_that_no_pool_held_lately_is_refused_at_once(lone: LoneGateway) -> None:
    lone.texts["n"] = lone.texts["m"]
    lone.put("Model", "n", {"source": "file:x"})
    async with asyncio.timeout(2):
        error = await refused(lone.inference.Generate(request(model="n")))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "in no pool now" in error.details()


async def test_only_one_retry(lone: LoneGateway, pool: ScriptedPool, other: ScriptedPool) -> None:
    """rule 9: the second failure is the answer."""
    tried: list[str] = []
    for each in (pool, other):
        each.script = lambda sequence, name=each.name: (tried.append(name), sequence.fail("unavailable", f"{name} lost a rank"))
    error = await refused(lone.inference.Generate(request(), timeout=10))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert sorted(tried) == ["a", "b"]


async def test_nothing_is_retried_after_the_first_token(
    lone: LoneGateway, pool: ScriptedPool, other: ScriptedPool, byte_level: Path
) -> None:
    """rule 9: UNAVAILABLE at once, with what had come before."""
    lone.observe(other, m=1_000)
    stream = lone.inference.GenerateStream(request(), timeout=10)
    sequence = await pool.next()
    sequence.tokens(ids_of(byte_level, "yes"))
    assert (await stream.read()).choices[0].text == "yes"
    await pool.stop()
    async with asyncio.timeout(2):
        error = await refused(stream.read())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert other.idle()


async def test_the_retry_follows_a_switched_route(lone: LoneGateway, pool: ScriptedPool, byte_level: Path) -> None:
    """A model that was taken away after its route was switched refuses; the request goes to the new target."""
    lone.texts["n"] = byte_level
    lone.put("Model", "n", {"source": "file:x"})
    lone.put("Route", "chat", {"targets": [{"model": "m"}]})
    second = ScriptedPool("b", ["n"])
    await second.start()
    lone.observe(second)
    await lone.wait_up("b")
    one_by_one(second, ids_of(byte_level, "yes"))
    call = lone.inference.Generate(request(model="chat"), timeout=10)
    answer = asyncio.ensure_future(call)
    sequence = await pool.next()
    lone.put("Route", "chat", {"targets": [{"model": "n"}]})
    sequence.fail("unavailable", "`m` is draining")
    response = await answer
    assert (response.model, response.choices[0].text) == ("n", "yes")
    metadata = dict(await call.initial_metadata())
    assert (metadata["modelyard-model"], metadata["modelyard-route-generation"]) == ("n", "2")


async def test_a_tokenizer_that_cannot_be_read_is_not_the_clients_fault(
    lone: LoneGateway, pool: ScriptedPool, tmp_path: Path
) -> None:
    lone.texts["broken"] = tmp_path
    lone.put("Model", "broken", {"source": "file:x"})
    error = await refused(lone.inference.Generate(request(model="broken"), timeout=10))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "tokenizer.json" in error.details()


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(lone: LoneGateway) -> None:
    error = await refused(lone.inference.Generate(request(prompt="x" * 2_000_000), timeout=10))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "2000000 characters" in error.details()


async def test_a_full_pool_is_tried_elsewhere(
    lone: LoneGateway, pool: ScriptedPool, other: ScriptedPool, byte_level: Path
) -> None:
    lone.observe(other, m=1_000)
    pool.script = lambda sequence: sequence.fail("exhausted", "full")
    one_by_one(other, ids_of(byte_level, "yes"))
    assert (await lone.inference.Generate(request(), timeout=10)).choices[0].text == "yes"


async def test_what_is_not_the_replicas_fault_is_not_retried(lone: LoneGateway, pool: ScriptedPool, other: ScriptedPool) -> None:
    tried: list[str] = []
    for each in (pool, other):
        each.script = lambda sequence: (tried.append("x"), sequence.fail("internal", "a bug"))
    error = await refused(lone.inference.Generate(request(), timeout=10))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert len(tried) == 1


# ---------------------------------------------------------------- foreign clients


FOREIGN_CLIENT = """
import sys, grpc, inference_pb2 as pb, inference_pb2_grpc as rpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = rpc.InferenceStub(channel)
    print(stub.Generate(pb.GenerateRequest(model="m", prompt="x"), timeout=10).choices[0].text)
    messages = [pb.Message(role="user", content="x")]
    for chunk in stub.ChatStream(pb.ChatRequest(model="m", messages=messages), timeout=10):
        print(chunk.choices[0].text, chunk.HasField("usage"))
    try:
        stub.Generate(pb.GenerateRequest(model="nope", prompt="x"), timeout=10)
    except grpc.RpcError as error:
        print(error.code().name)
"""


async def test_a_client_generated_from_the_published_proto(
    lone: LoneGateway, pool: ScriptedPool, byte_level: Path, tmp_path: Path
) -> None:
    """The .proto needs no other file, and a plain synchronous grpcio client made from it works."""
    folder = Path(pb.__file__).parent
    arguments = ["protoc", f"-I{folder}", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}", "inference.proto"]
    assert protoc.main(arguments) == 0
    ids = ids_of(byte_level, "ab")
    assert len(ids) == 2
    one_by_one(pool, ids, "stop")
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        FOREIGN_CLIENT,
        f"127.0.0.1:{lone.servers.grpc_port}",
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await client.communicate()
    lines = output.decode().splitlines()
    assert (lines[0], lines[-2:]) == ("ab", [lines[-2], "NOT_FOUND"])
    assert "".join(line.split(" ")[0] for line in lines[1:-1]) == "ab"
    assert [line.endswith("True") for line in lines[1:-1]] == [False] * (len(lines) - 3) + [True]


@pytest.mark.parametrize("frame", ["one", "several"])
async def test_rule_17_usage_is_complete_when_a_stop_string_ends_the_answer(
    lone: LoneGateway, pool: ScriptedPool, byte_level: Path, frame: str
) -> None:
    """rule 17: of the stop string only the gateway knows, of the cached tokens only the pool, which says it at the end."""
    call = lone.inference.GenerateStream(request(stop=["STOP"]), timeout=5)
    sequence = await pool.next()
    sequence.cached_tokens = 16
    ids = ids_of(byte_level, "yes STOP here")
    for part in [ids] if frame == "one" else [[token] for token in ids]:
        sequence.tokens(part)
    chunks = [chunk async for chunk in call]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "yes "
    assert chunks[-1].usage.cached_tokens == 16
    assert sequence.cancelled.is_set()
    assert lone.links.in_flight == 0


async def test_a_pool_that_never_says_the_end_delays_a_stopped_answer_only_so_long(
    lone: LoneGateway, pool: ScriptedPool, byte_level: Path
) -> None:
    call = lone.inference.Generate(request(stop=["STOP"]), timeout=5)
    sequence = await pool.next()
    sequence.end = lambda *_, **__: None  # type: ignore[method-assign]
    sequence.tokens(ids_of(byte_level, "yes STOP here"))
    assert (await call).choices[0].text == "yes "
    assert lone.links.in_flight == 0
