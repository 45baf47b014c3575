"""What no well-meaning client sends: each is refused as a bad request that names the field, on every surface."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from lone_gateway import LoneGateway, ids_of, until
from scripted_pool import ScriptedPool

from gateway.api.errors import YardError
from gateway.api.proto import inference_pb2 as pb
from gateway.servers.grpc_errors import fitting
from gateway.servers.openai_endpoint import MAX_BODY_BYTES
from gateway.servers.openai_request import completion_request, parse_body
from gateway.servers.request import GenerationRequest
from gateway.servers.submits import prompt_tokens

BODY = {"model": "m", "prompt": "x", "max_tokens": 3}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(autouse=True)
def answering(pool: ScriptedPool, byte_level: Path) -> None:
    pool.script = lambda sequence: sequence.end("length", tokens=ids_of(byte_level, "yes"), completion_tokens=1)


async def post(lone: LoneGateway, body: object, path: str = "completions", **headers: str) -> httpx.Response:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value.encode("latin-1") for name, value in headers.items()}
    async with httpx.AsyncClient(timeout=10) as client:
        return await client.post(f"{lone.http}/v1/{path}", content=raw, headers=named)


async def status(lone: LoneGateway, timeout: float | None = 10, **fields: object) -> tuple[grpc.StatusCode, str]:
    try:
        await lone.inference.Generate(pb.GenerateRequest(**{**BODY, **fields}), timeout=timeout)  # type: ignore[arg-type]
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


# ---------------------------------------------------------------- deadlines


async def test_odd_timeouts(lone: LoneGateway) -> None:
    for value in ("²", "1" * 400, "1" * 5000, "-5", "1.5", "", "1e3", "0x10", "NaN"):
        response = await post(lone, BODY, x_modelyard_timeout_ms=value)
        assert response.status_code == 400, value
        assert response.json()["error"]["param"] == "x-modelyard-timeout-ms"
        assert len(response.json()["error"]["message"]) < 200


async def test_a_deadline_beyond_what_a_pool_can_be_told(lone: LoneGateway, pool: ScriptedPool) -> None:
    """More milliseconds than 32 bit hold are as many as they hold."""
    assert (await post(lone, BODY, x_modelyard_timeout_ms=str(2**40))).status_code == 200
    assert pool.sequences[-1].submit.timeout_ms == 2**32 - 1
    assert (await status(lone, timeout=2.0**23))[0] is grpc.StatusCode.OK
    assert pool.sequences[-1].submit.timeout_ms == 2**32 - 1


# ---------------------------------------------------------------- numbers


async def test_numbers_of_many_digits(lone: LoneGateway) -> None:
    for field in ("temperature", "top_p", "top_k", "max_tokens", "n", "seed", "logprobs", "best_of"):
        for digits in (30, 400, 5000):
            raw = json.dumps({**BODY, field: "?"}).replace('"?"', "9" * digits).encode()
            response = await post(lone, raw)
            assert response.status_code == 400, response.text
            assert len(response.text) < 1000


async def test_deep_nesting(lone: LoneGateway) -> None:
    for path, depth in itertools.product(("completions", "chat/completions"), (300, 900, 100_000)):
        deep = b"[" * depth + b"]" * depth
        assert (await post(lone, deep, path)).status_code == 400
        tools = json.dumps({**CHAT, "prompt": "x", "tools": "?"}).encode().replace(b'"?"', deep)
        assert (await post(lone, tools, path)).status_code == 400
        inside = json.dumps({**CHAT, "messages": [{"role": "user", "content": "x", "more": "?"}]}).encode().replace(b'"?"', deep)
        assert (await post(lone, inside, path)).status_code in ((400,) if path.startswith("chat") else (200, 400))


# ---------------------------------------------------------------- names


async def test_long_names(lone: LoneGateway) -> None:
    """NOT_FOUND, also when the name does not fit what carries the status."""
    for name in ("x" * 9_000, "é" * 9_000, "\x00\n" * 5_000, "😀" * 20_000):
        code, details = await status(lone, model=name)
        assert code is grpc.StatusCode.NOT_FOUND
        assert len(details) < 600
        response = await post(lone, {**BODY, "model": name})
        assert response.status_code == 404
        assert len(response.text) < 2_000


def test_a_message_of_many_lines_fits_what_carries_it() -> None:
    assert fitting("a plain one") == "a plain one"
    assert len(fitting("ä" * 9_000)) < 1_100


# ---------------------------------------------------------------- sampling

OUT_OF_RANGE = [
    ("temperature", [1e-38, 1e-40, 1e-46, 1e-7, -1e-46, 101.0, 1e39]),
    ("top_p", [0.0, 1e-46, 1e-10, 1.001, -1.0]),
    ("min_p", [1e-46, 1e-10, 1.001, -0.5]),
    ("repetition_penalty", [0.0, 1e-45, 0.001, 101.0, 1e39]),
    ("presence_penalty", [2.001, -2.001, 1e39]),
    ("frequency_penalty", [2.001, -2.001, 1e300]),
]
IN_RANGE = [
    ("temperature", [0.0, 1e-6, 1.0, 100.0]),
    ("top_p", [1e-9, 1.0]),
    ("min_p", [0.0, 1e-9, 1.0]),
    ("repetition_penalty", [0.01, 100.0]),
    ("presence_penalty", [-2.0, 0.0, 1e-46, 2.0]),
    ("frequency_penalty", [-2.0, 2.0]),
]


def each(table: list[tuple[str, list[float]]]) -> list[tuple[str, float]]:
    return [(field, value) for field, values in table for value in values]


async def test_sampling_values_that_engines_cannot_compute_with(lone: LoneGateway, pool: ScriptedPool) -> None:
    for field, value in each(OUT_OF_RANGE):
        response = await post(lone, {**BODY, field: value})
        assert response.status_code == 400, (field, value)
        error = response.json()["error"]
        assert error["param"] == field
        assert "from " in error["message"]
    not_finite = [(field, value) for field, _ in OUT_OF_RANGE for value in (float("nan"), float("inf"), float("-inf"))]
    for field, value in [*each(OUT_OF_RANGE), *not_finite]:
        # A client of gRPC has made it 32 bit by then: what has become 0 there is 0.
        off = field in ("temperature", "min_p") and abs(value) < 1e-45
        code, _ = await status(lone, sampling=pb.Sampling(**{field: value}))
        assert code is (grpc.StatusCode.OK if off else grpc.StatusCode.INVALID_ARGUMENT), (field, value)


async def test_the_ends_of_the_ranges_are_taken(lone: LoneGateway) -> None:
    for field, value in each(IN_RANGE):
        response = await post(lone, {**BODY, field: value})
        assert response.status_code == 200, response.text
        assert (await status(lone, sampling=pb.Sampling(**{field: value})))[0] is grpc.StatusCode.OK


async def test_a_models_own_defaults_that_cannot_be_computed_with(lone: LoneGateway, pool: ScriptedPool) -> None:
    await until(lambda: lone.library.loaded("m"))
    text = lone.library.loaded("m")
    assert text is not None
    text.defaults.update(temperature=1e-40, top_p=0.0, top_k=-1, repetition_penalty=float("nan"))
    assert (await post(lone, BODY)).status_code == 200
    sampling = pool.sequences[-1].submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (1.0, 1.0, 0, 1.0)


# ---------------------------------------------------------------- sizes


class Unread(list[int]):
    """Token ids that nobody may look at one by one."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("read before its length was known to fit")


async def test_ids_that_cannot_fit_are_not_looked_at(lone: LoneGateway) -> None:
    await until(lambda: lone.library.loaded("m"))
    text = lone.library.loaded("m")
    assert text is not None
    request = GenerationRequest("m", "id", prompt_ids=Unread([1] * 300), max_tokens=1)
    with pytest.raises(YardError, match="300 tokens"):
        await prompt_tokens(request, text, 256)
    ids = pb.TokenIds(ids=[1] * 7_000_000)
    code, details = await status(lone, prompt_ids=ids)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "7000000" in details


def test_the_largest_body_is_read_in_a_moment() -> None:
    """A million ids take the event loop less than a tenth of what a client notices; what is larger is refused unread."""
    raw = json.dumps({**BODY, "prompt": [12345] * 1_000_000}).encode()
    began_s = time.thread_time()
    completion_request(parse_body(raw), "id", None, "")
    assert time.thread_time() - began_s < 0.5


async def test_too_much_of_anything_is_refused(lone: LoneGateway, pool: ScriptedPool) -> None:
    assert (await post(lone, b" " * (MAX_BODY_BYTES + 1))).status_code == 400
    for body in (
        {**BODY, "stop": ["x"] * 17},
        {**BODY, "stop_token_ids": [1] * 1025},
        {**BODY, "prompt": ["x"] * 65},
        {**BODY, "prompt": "x" * 1_000_000},
    ):
        response = await post(lone, body)
        assert response.status_code == 400, response.text
        assert "most" in response.text or "more than" in response.text
    chat = pb.ChatRequest(model="m", messages=[pb.Message(role="user")] * 10_000)
    for call in (
        lone.inference.Chat(chat, timeout=5),
        lone.inference.Tokenize(pb.TokenizeRequest(model="m", messages=chat.messages), timeout=5),
        lone.inference.Tokenize(pb.TokenizeRequest(model="m", text="x" * 2_000_000), timeout=5),
        lone.inference.Detokenize(pb.DetokenizeRequest(model="m", ids=[5] * 2_000_000), timeout=5),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="at most") as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not pool.sequences
    many = await lone.inference.Detokenize(pb.DetokenizeRequest(model="m", ids=[5] * 100_000), timeout=5)
    assert len(many.text) >= 100_000
