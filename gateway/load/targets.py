"""What load goes to: a gateway over gRPC, or anything that speaks OpenAI's HTTP."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from gateway.api.errors import GRPC_STATUS, ErrorCode, YardError, invalid
from gateway.api.grpc_options import CLIENT_OPTIONS
from gateway.api.proto import inference_pb2 as pb
from gateway.api.proto.inference_pb2_grpc import InferenceStub
from gateway.load.report import Outcome
from gateway.site.client_tls import ClientTls

TIMEOUT_S = 300.0
_TEXT = (
    "The harbour of the old town lies behind a long wall of grey stone, and every morning the boats come back with the first "
    "light. Merchants count crates, children run between ropes, and somebody always tells the story of the great storm. "
)
_CODES = {status: code.value for code, status in GRPC_STATUS.items()}


class Target(Protocol):
    async def ask(self, model: str, input_tokens: int, output_tokens: int, outcome: Outcome, rng: random.Random) -> None:
        """Fills `outcome` in. Never raises for what the target answered."""
        ...

    async def close(self) -> None: ...


class GrpcTarget:
    """Exact: prompts are cut by token, and answers do not end early."""

    def __init__(self, address: str, tls: ClientTls | None, api_key: str | None) -> None:
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, tls.credentials(), options=[*CLIENT_OPTIONS, *tls.options])
        self._stub = InferenceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._ids: dict[str, list[int]] = {}

    async def ask(self, model: str, input_tokens: int, output_tokens: int, outcome: Outcome, rng: random.Random) -> None:
        try:
            ids = await self._prompt(model, input_tokens, rng)
            request = pb.GenerateRequest(model=model, prompt_ids=pb.TokenIds(ids=ids), max_tokens=output_tokens, ignore_eos=True)
            watch = _Watch(outcome)
            async for chunk in self._stub.GenerateStream(request, timeout=TIMEOUT_S, metadata=self._metadata):
                if any(choice.text for choice in chunk.choices):
                    watch.text()
                if chunk.HasField("usage"):
                    outcome.tokens, outcome.prompt_tokens = chunk.usage.completion_tokens, chunk.usage.prompt_tokens
            watch.end()
        except grpc.aio.AioRpcError as error:
            outcome.error = _CODES.get(error.code(), error.code().name.lower())

    async def _prompt(self, model: str, count: int, rng: random.Random) -> list[int]:
        """Another beginning each time, so that no prefix is found in a cache."""
        if model not in self._ids:
            answer = await self._stub.Tokenize(
                pb.TokenizeRequest(model=model, text=_TEXT * 8), timeout=TIMEOUT_S, metadata=self._metadata
            )
            self._ids[model] = list(answer.ids)
        ids = self._ids[model]
        return rng.choices(ids, k=min(8, count)) + [ids[index % len(ids)] for index in range(max(count - 8, 0))]

    async def close(self) -> None:
        await self._channel.close()


class HttpTarget:
    """About as exact as four letters a token are."""

    def __init__(self, url: str, api_key: str | None) -> None:
        import httpx

        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers, timeout=TIMEOUT_S, limits=limits)

    async def ask(self, model: str, input_tokens: int, output_tokens: int, outcome: Outcome, rng: random.Random) -> None:
        import httpx

        prompt = f"{rng.getrandbits(64):x} {_TEXT * (input_tokens * 4 // len(_TEXT) + 1)}"[: input_tokens * 4]
        body = {"model": model, "prompt": prompt, "max_tokens": output_tokens, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        watch = _Watch(outcome)
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    outcome.error = str(response.status_code)
                    return
                async for event in _events(response.aiter_lines()):
                    if any(choice.get("text") for choice in event.get("choices", ())):
                        watch.text()
                    if usage := event.get("usage"):
                        outcome.tokens, outcome.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
            watch.end()
        except httpx.HTTPError as error:
            outcome.error = type(error).__name__

    async def close(self) -> None:
        await self._client.aclose()


class _Watch:
    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._began = self._last = time.perf_counter()

    def text(self) -> None:
        now = time.perf_counter()
        if self._outcome.first_s:
            self._outcome.gaps_s.append(now - self._last)
        else:
            self._outcome.first_s = now - self._began
        self._last = now

    def end(self) -> None:
        self._outcome.total_s = time.perf_counter() - self._began


async def _events(stream: AsyncIterator[str]) -> AsyncIterator[dict]:
    async for line in stream:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def target_of(url: str, tls: ClientTls | None, api_key: str | None) -> Target:
    """`host:port` and `grpc://host:port` over gRPC, `http://…` and `https://…` over HTTP."""
    scheme, _, rest = url.rpartition("://")
    if scheme in ("", "grpc"):
        return GrpcTarget(rest, tls, api_key)
    if scheme in ("http", "https"):
        return HttpTarget(url, api_key)
    raise invalid(f"{url!r} is no target; write host:port, grpc://host:port or http://host:port")


async def check(target: Target, model: str) -> None:
    """One short request first: a run against what does not answer says nothing. YardError with the reason."""
    outcome = Outcome(0.0)
    async with asyncio.timeout(TIMEOUT_S):
        await target.ask(model, 4, 1, outcome, random.Random(0))
    if outcome.error:
        raise YardError(_error_code(outcome.error), f"a first request to `{model}` ended with {outcome.error}; see `yard ps`")


def _error_code(text: str) -> ErrorCode:
    return ErrorCode(text) if text in {code.value for code in ErrorCode} else ErrorCode.UNAVAILABLE
