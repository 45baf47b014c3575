"""A server that speaks OpenAI's HTTP, such as `trtllm-serve`: asked for streams, answered in text."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import os
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import aiohttp
import msgspec

from gateway.api.config import ModelSpec
from gateway.api.errors import ErrorCode, YardError, invalid, shortened, unavailable
from gateway.api.proto.pool_pb2 import End, Submit
from gateway.link.flight import Text
from gateway.link.server import Answer, Facts, Unreachable
from gateway.link.server_events import EventReader
from gateway.link.server_key import key_headers, ssl_context
from gateway.link.words import Words

CONNECT_S = 5.0
LOOK_TIMEOUT_S = 5.0
MOST_ERROR_BYTES = 64 * 2**10
MOST_LIST_BYTES = 4 * 2**20
RETRY_AFTER_S = 1.0
DRAIN_S = 0.02

_FINISH = {
    "stop": "stop",
    "length": "length",
    "content_filter": "content_filter",
    "tool_calls": "stop",
    "function_call": "stop",
}
_UNREACHABLE = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorCertificateError)
_REFUSALS = (400, 405, 409, 413, 414, 415, 422)  # of the request itself


class OpenAiServer:
    """Token ids, where a tokenizer of it is here, go to its /completions; messages to /chat/completions, prompts to /completions.

    The fields that it is sent are OpenAI's, and beyond them only what the client asked for. No redirect is followed, as it
    would take the key elsewhere.
    """

    def __init__(self, model: str, spec: ModelSpec) -> None:
        address = spec.address
        assert address is not None
        self._model = model
        self._spec = spec
        self._address = address
        self._name = address.model
        self._session: aiohttp.ClientSession | None = None
        self._where = f"the server of model `{model}` at {address.base_url}"

    async def look(self) -> Facts:
        try:
            async with (
                asyncio.timeout(LOOK_TIMEOUT_S),
                self._open().get(self._url("/models"), headers=self._headers(), allow_redirects=False) as response,
            ):
                body = await _whole(response, MOST_LIST_BYTES)
                if response.status != 200:
                    raise self._refusal(response.status, body, response.headers)
        except TimeoutError as error:
            raise Unreachable(f"{self._where} did not list its models within {LOOK_TIMEOUT_S:.0f} s") from error
        except aiohttp.ClientError as error:
            raise self._lost(error) from error
        return self._read_models(body)

    def _read_models(self, body: bytes) -> Facts:
        try:
            listed = {str(item["id"]): item for item in msgspec.json.decode(body)["data"]}
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise unavailable(f"{self._where} lists no models as OpenAI does; the path in source is mostly /v1") from error
        name = self._address.model or (next(iter(listed)) if len(listed) == 1 else "")
        if name not in listed:
            asked = f"not `{name}`" if name else "so source must say which"
            known = shortened(", ".join(listed), 256) or "no model"
            raise unavailable(f"{self._where} serves {known}, {asked}: write its name after # in source")
        self._name = name
        context = listed[name].get("max_model_len")
        return Facts(context if isinstance(context, int) and context > 0 else 0)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def answer(self, submit: Submit, words: Words) -> Answer:
        return self._answer(submit, words)

    async def _answer(self, submit: Submit, words: Words) -> AsyncGenerator[Text | End, None]:
        chat = words.messages is not None and not submit.prompt_ids
        url = self._url("/chat/completions" if chat else "/completions")
        headers = {**self._headers(), "accept": "text/event-stream"}
        if submit.traceparent:
            headers["traceparent"] = submit.traceparent
        if submit.request_id:
            headers["x-request-id"] = submit.request_id
        try:
            body = self._body(submit, words)
            response = await self._open().post(url, json=body, headers=headers, allow_redirects=False)
        except aiohttp.ClientError as error:
            raise self._lost(error) from error
        except TimeoutError as error:
            raise Unreachable(f"{self._where} took no connection within {CONNECT_S:.0f} s") from error
        try:
            if response.status != 200:
                body = await _whole(response, MOST_ERROR_BYTES)
                raise self._refusal(response.status, body, response.headers)
            async for event in self._read(response, chat):
                yield event
        except aiohttp.ClientError as error:
            raise unavailable(f"{self._where} broke its answer off: {_describe(error)}", RETRY_AFTER_S) from error
        finally:
            response.close()  # what is not read to its end is thereby cancelled there

    async def _read(self, response: aiohttp.ClientResponse, chat: bool) -> AsyncGenerator[Text | End, None]:
        """Until the usage was told, or the stream ended, after a reason to finish."""
        reader = EventReader()
        end = End(stop_token_id=-1)
        async for piece in response.content.iter_any():
            for data in reader.feed(piece):
                if data == b"[DONE]":
                    if not end.finish_reason:
                        raise unavailable(f"{self._where} ended its answer without a reason", RETRY_AFTER_S)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(DRAIN_S):
                            await response.content.readany()  # a connection that is read to its end is used again
                    yield end
                    return
                chunk = self._chunk(data)
                if usage := chunk.get("usage"):
                    _count(usage, end)
                for choice in chunk.get("choices") or ():
                    reason = choice.get("finish_reason")
                    text = ((choice.get("delta") or {}).get("content") if chat else choice.get("text")) or ""
                    stop = choice.get("stop_reason") if reason else None
                    # Also without text, as while it reasons: it goes on.
                    yield Text(text, int(bool(text)), "" if stop is None else str(stop))
                    if reason:
                        end.finish_reason = _FINISH.get(reason, "cancelled")
        if not end.finish_reason:
            raise unavailable(f"{self._where} broke its answer off", RETRY_AFTER_S)
        yield end

    def _chunk(self, data: bytes) -> dict[str, Any]:
        try:
            chunk = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise YardError(ErrorCode.INTERNAL, f"{self._where} sent an event that is not JSON: {error}") from error
        if not isinstance(chunk, dict):
            raise YardError(ErrorCode.INTERNAL, f"{self._where} sent an event that is not an object")
        if "error" in chunk or chunk.get("object") == "error":
            raise self._refusal(_status(chunk), data, {})
        return chunk

    def _body(self, submit: Submit, words: Words) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._name, "stream": True, "stream_options": {"include_usage": True}, **words.sampling}
        if submit.prompt_ids:
            body["prompt"] = list(submit.prompt_ids)
        elif words.messages is not None:
            body["messages"] = [dict(message) for message in words.messages]
        else:
            body["prompt"] = words.prompt or ""
            if not words.add_special_tokens:
                body["add_special_tokens"] = False
        if submit.max_tokens:
            body["max_tokens"] = submit.max_tokens
        if "seed" in words.sampling:
            body["seed"] = submit.sampling.seed  # each choice has its own
        if words.stop:
            body["stop"] = list(words.stop)
        if submit.stop_token_ids:
            body["stop_token_ids"] = list(submit.stop_token_ids)
        if submit.ignore_eos:
            body["ignore_eos"] = True
        return body

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            context = ssl_context(self._spec.server) if self._address.tls else True
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=context), timeout=timeout)
        return self._session

    def _headers(self) -> dict[str, str]:
        return key_headers(self._spec.server)

    def _url(self, path: str) -> str:
        return self._address.base_url + path

    def _lost(self, error: aiohttp.ClientError) -> YardError:
        if isinstance(error, _UNREACHABLE):
            return Unreachable(f"{self._where} cannot be reached: {_describe(error)}")
        return unavailable(f"{self._where} closed the connection: {_describe(error)}", RETRY_AFTER_S)

    def _refusal(self, status: int, body: bytes, headers: Mapping[str, str]) -> YardError:
        said = f"{self._where} said {status}: {_message(body)}"
        retry_s = _retry_after_s(headers.get("retry-after"))
        if status in _REFUSALS:
            return invalid(said)
        if status == 429:
            return YardError(ErrorCode.EXHAUSTED, said, retry_after_s=retry_s)
        if status in (401, 403):
            return unavailable(f"{said}; see server.key_env and server.key_file of model `{self._model}`", retry_s)
        if status == 404:
            return unavailable(f"{said}; see the path and the name after # in the source of model `{self._model}`", retry_s)
        if status in (500, 501):
            return YardError(ErrorCode.INTERNAL, said)
        return unavailable(said, retry_s)


async def _whole(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Its body, or the beginning of one that is longer."""
    body = b""
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > most:
            break
    return body[:most]


def _count(usage: Mapping[str, Any], end: End) -> None:
    end.prompt_tokens = int(usage.get("prompt_tokens") or 0)
    end.completion_tokens = int(usage.get("completion_tokens") or 0)
    details = usage.get("prompt_tokens_details") or {}
    end.cached_tokens = int(details.get("cached_tokens") or 0)


def _status(chunk: Mapping[str, Any]) -> int:
    """Of an error inside a stream, which has begun with 200."""
    error = chunk.get("error")
    code = error.get("code") if isinstance(error, dict) else chunk.get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _message(body: bytes) -> str:
    """What OpenAI, `trtllm-serve` and FastAPI call it; else what is there."""
    text = body.decode("utf-8", "replace").strip()
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        found = msgspec.json.decode(body)
        if isinstance(found, dict):
            error = found.get("error")
            inner = error.get("message") if isinstance(error, dict) else error
            text = next((str(one) for one in (inner, found.get("message"), found.get("detail")) if one), text)
    return shortened(" ".join(text.split()), 500) or "nothing"


def _retry_after_s(value: str | None) -> float:
    """Seconds, or a date."""
    if value is None:
        return RETRY_AFTER_S
    with contextlib.suppress(ValueError):
        return min(max(float(value), 0.1), 3600.0)
    with contextlib.suppress(ValueError, TypeError):
        return min(max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.1), 3600.0)
    return RETRY_AFTER_S


def _describe(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        number = error.os_error.errno or 0
        return os.strerror(number) if number > 0 else error.os_error.strerror or str(error.os_error)
    return str(error) or type(error).__name__
