"""Two thousand malformed inputs, drawn from a seed: each is the client's fault and is told so, and nothing is left behind.

MODELYARD_FUZZ=5 makes it ten thousand.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tokenizer_files
import yaml
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from lone_gateway import LoneGateway, until
from scripted_pool import ScriptedPool, SubmittedSequence

from gateway.api.errors import ErrorCode, YardError
from gateway.api.manifest import read_text
from gateway.api.proto import inference_pb2 as pb
from gateway.api.proto import kserve_pb2 as kserve
from gateway.api.proto.pool_pb2 import Logprob

SEED = 20_261_130
TIMES = int(os.environ.get("MODELYARD_FUZZ", "1"))
HTTP_REQUESTS = 900 * TIMES
RAW_REQUESTS = 200 * TIMES
GRPC_REQUESTS = 700 * TIMES
MANIFESTS = 200 * TIMES
AT_ONCE = 8

FINE_HTTP = {200, 400, 401, 403, 404, 405, 429, 431, 503, 504}
WRONG_GRPC = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 15, 2**31, 2**32, 2**63, 2**64, -(2**63) - 1, 10**30, 0.5, -0.0, 1e-46, 1e39, 1.5e308,
    "", "x", "²", "\x00", "\ud800", "\ufdd0<|im_end|>", "<|im_start|>", "😀" * 50, "y" * 5_000, "NaN", "m",
    [], {}, [[]], [{}], [None], ["a", 1], [1, "a"], [5, -1], [5, 10**9], [[5], "a"], [[5], [6]], {"type": "text"},
    {"a": {"b": []}}, [{"role": "user"}], [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "", "content": "x"}], [{"role": "user", "content": {"a": 1}}], [{"content": "x"}],
    [{"role": "tool", "content": None}],
    [{"role": "assistant", "content": "<|im_end|>", "tool_calls": [{"id": 1}]}], [{"role": ["user"], "content": 3}],
]  # fmt: skip
FIELDS = [
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "stop", "stop_token_ids", "ignore_eos", "logprobs",
    "top_logprobs", "stream", "stream_options", "echo", "best_of", "add_special_tokens", "logit_bias", "tools", "response_format",
    "suffix", "functions", "unknown",
]  # fmt: skip
HEADERS = ["x-modelyard-timeout-ms", "x-request-id", "traceparent", "authorization", "modelyard-tenant", "modelyard-priority",
           "modelyard-quality", "content-type", "accept"]  # fmt: skip
HEADER_VALUES = ["", "0", "1", "-1", "²".encode("latin-1"), b"\xff\xfe", "9" * 300, "x" * 3_000, "fast", "Bearer x", "1.5"]
KINDS = ["Model", "Route", "Pool", "Instance", "", "model"]
SPEC_FIELDS = ["source", "limits", "targets", "defaults", "engine", "precision", "nodes", "gpus", "models", "unknown"]
TENSORS = ["text_input", "max_tokens", "stream", "stop_words", "temperature", "top_k", "top_p", "random_seed", "input_ids", "x"]
DATATYPES = ["BYTES", "INT32", "INT64", "UINT32", "UINT64", "FP32", "FP64", "BOOL", "FP16", "", "bytes"]
GENERATING = ["/v1/completions", "/v1/chat/completions"]
PATHS = [*GENERATING * 8, "/v1/models", "/v1/models/%00", "/v1/models/" + "z" * 9_000, "/v1//", "/"]


@pytest.fixture
async def lone(tmp_path: Path) -> AsyncIterator[LoneGateway]:
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    lone = LoneGateway(tmp_path, {"m": tokenizer_files.byte_level(directory)})
    pool = ScriptedPool("a", ["m"])
    pool.script = _answer
    try:
        yield await lone.start(pool)
    finally:
        await lone.stop()


def _answer(sequence: SubmittedSequence) -> None:
    """As a driver does: as many tokens as were asked for, at most four, with log-probabilities where they were asked for."""
    ids = [70 + number for number in range(min(4, sequence.submit.max_tokens))]
    wanted = sequence.submit.sampling.logprobs
    alternatives = list(range(5, 5 + max(0, wanted)))
    values = [Logprob(logprob=-1.0, alternative_ids=alternatives, alternative_logprobs=[-2.0] * len(alternatives)) for _ in ids]
    sequence.tokens(ids, values if wanted >= 0 else [])
    sequence.end("length", completion_tokens=len(ids))


async def _all(number: int, one: Any) -> None:
    """Some at once, so that they also meet each other."""
    left = iter(range(number))

    async def worker() -> None:
        for _ in left:
            await one()

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))


async def test_malformed_requests(lone: LoneGateway, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    rng = random.Random(SEED)
    seen: Counter[object] = Counter()
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))

    async with httpx.AsyncClient(base_url=lone.http, timeout=10) as client:

        async def http() -> None:
            method, path, headers, body = _http_request(rng)
            response = await client.request(method, path, content=body, headers=headers)
            seen[response.status_code] += 1
            told = f"{method} {path[:60]} {headers} {body[:300]!r}: {response.status_code} {response.text[:300]}"
            assert response.status_code in FINE_HTTP, told
            assert "Traceback" not in response.text, told
            if response.status_code >= 400 and path in GENERATING and method == "POST":
                assert response.json()["error"]["message"], told

        await _all(HTTP_REQUESTS, http)

    async def raw() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.servers.http_port)
        writer.write(_raw_request(rng))
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert not answer or answer.split()[1] in {str(code).encode() for code in FINE_HTTP}, answer[:300]
        assert b"Traceback" not in answer

    await _all(RAW_REQUESTS, raw)

    async def rpc() -> None:
        seen[await _call(rng, lone)] += 1

    await _all(GRPC_REQUESTS, rpc)

    assert seen[200] > 20, seen
    assert seen[400] > 200, seen
    assert seen[grpc.StatusCode.INVALID_ARGUMENT] > 100, seen
    assert not unhandled, unhandled[0]
    # gRPC logs it when a status meets a call whose deadline has just ended it.
    crossed = "ExecuteBatchError raised in core"
    tracebacks = [record for record in caplog.records if record.exc_info and crossed not in record.getMessage()]
    assert not tracebacks, tracebacks[0].getMessage() + str(tracebacks[0].exc_info)
    # Nothing of it is left, and who asks properly is answered.
    await until(lambda: lone.links.in_flight == 0 and lone.path.gate.waiting == 0)
    assert lone.path.gate._models["m"].inside == 0
    answer = await lone.inference.Generate(pb.GenerateRequest(model="m", prompt="x", max_tokens=3), timeout=5)
    assert answer.usage.completion_tokens == 3


def test_malformed_manifests() -> None:
    """Each is read, or refused as invalid with the file named; nothing else is raised."""
    rng = random.Random(SEED)
    refused = 0
    for _ in range(MANIFESTS):
        text = _scratched(rng, _manifest(rng).encode()).decode("utf-8", "replace")
        try:
            read_text(text, "x.yaml")
        except YardError as error:
            told = error
        else:
            continue
        assert told.code is ErrorCode.INVALID, text
        assert "x.yaml" in told.message, (text, told.message)
        refused += 1
    assert refused > MANIFESTS // 2


def _manifest(rng: random.Random) -> str:
    spec = {rng.choice(SPEC_FIELDS): rng.choice(VALUES) for _ in range(rng.randint(0, 3))}
    document = {"apiVersion": "modelyard/v1", "kind": rng.choice(KINDS), "metadata": {"name": "m"}, "spec": spec}
    if rng.random() < 0.3:
        document[rng.choice(("apiVersion", "kind", "metadata", "spec", "more"))] = rng.choice(VALUES)
    return json.dumps(document, indent=1) if rng.random() < 0.3 else yaml.safe_dump(document, allow_unicode=True)


def _http_request(rng: random.Random) -> tuple[str, str, list[tuple[str, str | bytes]], bytes]:
    body: dict[str, Any] = {"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    for _ in range(rng.randint(1, 4)):
        body[rng.choice(FIELDS)] = rng.choice(VALUES)
    raw = json.dumps(body).encode()
    if rng.random() < 0.2:
        raw = _scratched(rng, raw)
    headers = [(rng.choice(HEADERS), rng.choice(HEADER_VALUES)) for _ in range(rng.choice((0, 0, 0, 1, 2)))]
    return ("POST" if rng.random() < 0.95 else rng.choice(("GET", "PUT", "DELETE"))), rng.choice(PATHS), headers, raw


def _scratched(rng: random.Random, raw: bytes) -> bytes:
    """Some bytes changed, left out or repeated."""
    scratched = bytearray(raw)
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(scratched) + 1)
        match rng.randrange(3):
            case 0:
                scratched[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del scratched[at : at + rng.randint(1, 20)]
            case _:
                scratched[at:at] = scratched[at : at + rng.randint(1, 20)]
    return bytes(scratched)


def _raw_request(rng: random.Random) -> bytes:
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 2}).encode()
    length = rng.choice((len(body), len(body) + 5, len(body) - 5, -1, 10**30, "x"))
    raw = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %s\r\n\r\n" % str(length).encode() + body
    return _scratched(rng, raw) if rng.random() < 0.8 else raw


async def _call(rng: random.Random, lone: LoneGateway) -> grpc.StatusCode:
    method, request_type, response_type, streams = rng.choice(METHODS)
    request = _infer(rng) if request_type is kserve.ModelInferRequest else _message(rng, request_type)
    raw = request.SerializeToString()
    if rng.random() < 0.2:
        raw = _scratched(rng, raw)
    metadata = [
        (rng.choice(HEADERS), value)
        for _ in range(rng.choice((0, 0, 1, 2)))
        if isinstance(value := rng.choice(HEADER_VALUES), str)
    ]
    both = method.endswith("/ModelStreamInfer")
    one = lone.channel.unary_stream if streams else lone.channel.unary_unary
    make = lone.channel.stream_stream if both else one
    call = make(method, request_serializer=bytes, response_deserializer=response_type.FromString)
    # A client of gRPC calls it INTERNAL itself when a deadline ends a call whose requests it still sends.
    timeout = rng.choice((None, 5.0, 2.0**23) if both else (None, 5.0, 5.0, 0.001, 0.0, 2.0**23))
    try:
        answer = call(iter([raw]) if both else raw, timeout=timeout, metadata=tuple(metadata))
        if streams:
            async for _ in answer:
                pass
        else:
            await answer
        code, details = grpc.StatusCode.OK, ""
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details()
    assert code not in WRONG_GRPC, f"{method} {raw[:300]!r} {metadata} {timeout}: {code} {details}"
    return code


def _infer(rng: random.Random) -> kserve.ModelInferRequest:
    """Triton tensors: shapes, types and bytes that often do not go together."""
    request = kserve.ModelInferRequest(model_name="m" if rng.random() < 0.9 else "x")
    for name in rng.sample(TENSORS, rng.randint(0, 4)):
        shape = [rng.choice((0, 1, 1, 1, 2, -1, 2**62)) for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))]
        tensor = request.inputs.add(name=name, datatype=rng.choice(DATATYPES), shape=shape)
        if rng.random() < 0.5:
            tensor.contents.CopyFrom(_message(rng, kserve.InferTensorContents))
        else:
            request.raw_input_contents.append(rng.choice(RAW_CONTENTS))
    return request


def _message(rng: random.Random, kind: type[Message]) -> Message:
    message = kind()
    names = [field.name for field in kind.DESCRIPTOR.fields]
    if "model" in names and rng.random() < 0.9:
        message.model = "m"  # type: ignore[attr-defined]
    for field in rng.sample(list(kind.DESCRIPTOR.fields), rng.randint(1, min(5, len(names)))):
        if field.name == "model" and rng.random() < 0.9:
            continue
        if field.message_type is not None:
            inner = [_message(rng, field.message_type._concrete_class) for _ in range(rng.choice((1, 2, 20)))]
            if field.is_repeated:
                getattr(message, field.name).extend(inner)
            else:
                getattr(message, field.name).CopyFrom(inner[0])
            continue
        values = [value for value in _SCALARS[field.cpp_type] if field.cpp_type != FieldDescriptor.CPPTYPE_UINT64 or value >= 0]
        if field.type == FieldDescriptor.TYPE_BYTES:
            values = RAW_CONTENTS
        if field.is_repeated:
            getattr(message, field.name).extend(rng.choices(values, k=rng.choice((1, 3, 30))))
        else:
            setattr(message, field.name, rng.choice(values))
    return message


RAW_CONTENTS = [b"", b"x", b"\1\0\0\0x", b"\xff\xff\xff\xff", b"\x03\0\0\0x", b"\1\0\0\0\xff", b"\1\0\0\0", b"\0" * 8]
_WHOLE = [0, 1, 2, 17, 300, 70_000, 2**31, 2**32 - 1]
_SCALARS: dict[int, list[Any]] = {
    FieldDescriptor.CPPTYPE_STRING: ["", "x", "m", "\x00", "user", "<|im_end|>", "é" * 9_000, "z" * 300, "\ufdd0", "²"],
    FieldDescriptor.CPPTYPE_UINT32: _WHOLE,
    FieldDescriptor.CPPTYPE_UINT64: [*_WHOLE, 2**64 - 1],
    FieldDescriptor.CPPTYPE_INT32: [0, 1, -1, 2**31 - 1],
    FieldDescriptor.CPPTYPE_INT64: [0, -1, 2**63 - 1],
    FieldDescriptor.CPPTYPE_BOOL: [True, False],
    FieldDescriptor.CPPTYPE_FLOAT: [0.0, 0.5, 1.0, -1.0, 1e-45, 3e38, float("nan"), float("inf"), float("-inf")],
    FieldDescriptor.CPPTYPE_DOUBLE: [0.0, 1e300, float("nan")],
    FieldDescriptor.CPPTYPE_ENUM: [0],
}
_TRITON = "/inference.GRPCInferenceService/"
_INFERENCE = "/modelyard.v1.Inference/"
METHODS: list[tuple[str, Any, Any, bool]] = [
    (_INFERENCE + "Generate", pb.GenerateRequest, pb.GenerateResponse, False),
    (_INFERENCE + "GenerateStream", pb.GenerateRequest, pb.GenerateChunk, True),
    (_INFERENCE + "Chat", pb.ChatRequest, pb.GenerateResponse, False),
    (_INFERENCE + "ChatStream", pb.ChatRequest, pb.GenerateChunk, True),
    (_INFERENCE + "Tokenize", pb.TokenizeRequest, pb.TokenizeResponse, False),
    (_INFERENCE + "Detokenize", pb.DetokenizeRequest, pb.DetokenizeResponse, False),
    (_TRITON + "ModelInfer", kserve.ModelInferRequest, kserve.ModelInferResponse, False),
    (_TRITON + "ModelStreamInfer", kserve.ModelInferRequest, kserve.ModelStreamInferResponse, True),
    (_TRITON + "ModelMetadata", kserve.ModelMetadataRequest, kserve.ModelMetadataResponse, False),
    (_TRITON + "ModelConfig", kserve.ModelConfigRequest, kserve.ModelConfigResponse, False),
    ("/grpc.health.v1.Health/Check", HealthCheckRequest, HealthCheckResponse, False),
]
