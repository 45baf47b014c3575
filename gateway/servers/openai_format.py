"""Writes OpenAI's response bodies: whole answers, chunks, logprobs in both formats, usage and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.api.errors import ErrorCode, YardError
from gateway.servers.choice_stream import ChoiceDelta, TokenLogprob
from gateway.servers.generation import Usage
from gateway.text.tool_calls import CallDelta

_ERRORS: dict[ErrorCode, tuple[str, str | None]] = {
    # code -> OpenAI's type and code
    ErrorCode.NOT_FOUND: ("invalid_request_error", "model_not_found"),
    ErrorCode.INVALID: ("invalid_request_error", None),
    ErrorCode.UNAUTHENTICATED: ("authentication_error", "invalid_api_key"),
    ErrorCode.DENIED: ("permission_error", "insufficient_permissions"),
    ErrorCode.EXHAUSTED: ("rate_limit_error", "rate_limit_exceeded"),
    ErrorCode.UNAVAILABLE: ("service_unavailable_error", "unavailable"),
    ErrorCode.DEADLINE: ("timeout_error", "deadline_exceeded"),
    ErrorCode.CANCELLED: ("cancelled_error", "client_closed_request"),
    ErrorCode.CONFLICT: ("conflict_error", "conflict"),
    ErrorCode.UNIMPLEMENTED: ("invalid_request_error", "unsupported_value"),
    ErrorCode.INTERNAL: ("server_error", "internal_error"),
}


def error_body(error: YardError) -> dict[str, Any]:
    kind, code = _ERRORS[error.code]
    param = "model" if error.code is ErrorCode.NOT_FOUND and error.field is None else error.field
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class ChatFormat:
    """/v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self) -> None:
        self._begun: set[int] = set()

    def whole(self, delta: ChoiceDelta, wants_logprobs: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
        if delta.calls:
            message |= {"content": delta.text or None, "tool_calls": _whole_calls(delta.calls)}
        return {
            "index": delta.index,
            "message": message,
            "logprobs": self._logprobs(delta.logprobs) if wants_logprobs else None,
            "finish_reason": _finish(delta),
        }

    def chunk(self, delta: ChoiceDelta) -> dict[str, Any]:
        content: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            content = {"role": "assistant", "content": delta.text or None if delta.calls else delta.text}
        if delta.calls:
            content["tool_calls"] = [_call_delta(call) for call in delta.calls]
        return {
            "index": delta.index,
            "delta": content,
            "logprobs": self._logprobs(delta.logprobs) if delta.logprobs else None,
            "finish_reason": _finish(delta),
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [
            {**_token(logprob), "top_logprobs": [_token(alternative) for alternative in logprob.alternatives]}
            for logprob in logprobs
        ]
        return {"content": content, "refusal": None}


class CompletionFormat:
    """/v1/completions."""

    object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def whole(self, delta: ChoiceDelta, wants_logprobs: bool) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta) if wants_logprobs else None,
            "finish_reason": _finish(delta),
        }

    def chunk(self, delta: ChoiceDelta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta) if delta.logprobs else None,
            "finish_reason": _finish(delta),
        }

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any]:
        """`text_offset`: where in the answer each token's text begins, in characters; the tokens of one character share it.
        `top_logprobs` always holds the chosen token too."""
        return {
            "tokens": [_text(logprob) for logprob in delta.logprobs],
            "token_logprobs": [logprob.logprob for logprob in delta.logprobs],
            "top_logprobs": [
                {_text(one): one.logprob for one in (*logprob.alternatives, logprob)} if logprob.alternatives else None
                for logprob in delta.logprobs
            ],
            "text_offset": [logprob.offset for logprob in delta.logprobs],
        }


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _whole_calls(deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if delta.id:
            calls[delta.index] = {
                "id": delta.id,
                "type": "function",
                "function": {"name": delta.name, "arguments": delta.arguments},
            }
        else:
            calls[delta.index]["function"]["arguments"] += delta.arguments
    return list(calls.values())


def _token(logprob: TokenLogprob) -> dict[str, Any]:
    return {"token": _text(logprob), "logprob": logprob.logprob, "bytes": list(logprob.raw)}


def _text(logprob: TokenLogprob) -> str:
    """Part of a character is written as its bytes, as OpenAI does, so that different ones stay different keys."""
    try:
        return logprob.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in logprob.raw)


def _finish(delta: ChoiceDelta) -> str | None:
    # OpenAI has no reason for an answer that the server cut short; "length" is the one that tells clients it is not complete.
    return {"": None, "cancelled": "length"}.get(delta.finish_reason, delta.finish_reason)
