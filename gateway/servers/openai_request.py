"""Reads OpenAI's request bodies. Fields that change the answer and that we do not have are refused; all others are ignored."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.api.errors import invalid
from gateway.api.nesting import within
from gateway.servers.openai_response_format import json_schema_of, schema_field
from gateway.servers.openai_tools import ToolUse, check_calls, use_tools
from gateway.servers.request import MAX_MESSAGES, MAX_STOP_STRINGS, GenerationRequest, Sampling, too_many

MAX_PROMPTS = 64
MAX_MESSAGE_DEPTH = 32
COMPLETION_MAX_TOKENS = 16  # what OpenAI's /v1/completions takes when max_tokens is absent

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # field -> the values that ask for nothing we lack
    "logit_bias": ({},),
    "functions": ([],),
    "modalities": (["text"], []),
    "suffix": ("",),
    "use_beam_search": (False,),
    "prediction": (),
    "audio": (),
    "web_search_options": (),
}


@dataclass(slots=True)
class ApiRequest:
    """One call: a generation for each prompt (chat has one). `prompts` keeps what `echo` repeats."""

    chat: bool
    model: str
    generations: list[GenerationRequest]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    request_id: str
    prompts: list[str | list[int]] = field(default_factory=list)
    tools: ToolUse | None = None


def parse_body(raw: bytes) -> dict[str, Any]:
    # Millions of small values would make the collector look through all of them again and again.
    gc.disable()
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise invalid(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise invalid("the body is nested too deeply") from error
    finally:
        gc.enable()
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    return body


def chat_request(body: dict[str, Any], request_id: str, deadline: float | None, traceparent: str) -> ApiRequest:
    fields = _Fields(body)
    generation = _common(fields, request_id, deadline, traceparent)
    generation.messages = _messages(body.get("messages"))
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    generation.max_tokens = fields.integer(limit)
    wants_logprobs = fields.boolean("logprobs")
    top_logprobs = fields.integer("top_logprobs")
    if top_logprobs is not None and not wants_logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    generation.logprobs = (top_logprobs or 0) if wants_logprobs else None
    generation.names |= {"max_tokens": limit, "logprobs": "top_logprobs"}
    tools = use_tools(body, generation)
    request = _api_request(fields, True, [generation], request_id)
    request.tools = tools
    return request


def completion_request(body: dict[str, Any], request_id: str, deadline: float | None, traceparent: str) -> ApiRequest:
    fields = _Fields(body)
    if body.get("tools"):
        raise invalid("tools are offered in chats: ask /v1/chat/completions", "tools")
    prompts = read_prompts(body.get("prompt"), "prompt", MAX_PROMPTS)
    generations = []
    for prompt in prompts:
        generation = _common(fields, request_id, deadline, traceparent)
        if isinstance(prompt, str):
            generation.prompt = prompt
        else:
            generation.prompt_ids = prompt
        generation.names |= {"prompt_ids": "prompt"}
        max_tokens = fields.integer("max_tokens")
        generation.max_tokens = COMPLETION_MAX_TOKENS if max_tokens is None else max_tokens
        generation.logprobs = fields.integer("logprobs")
        generation.add_special_tokens = fields.boolean("add_special_tokens", True)
        generations.append(generation)
    request = _api_request(fields, False, generations, request_id)
    request.prompts = prompts
    request.echo = fields.boolean("echo")
    if request.echo and generations[0].logprobs is not None:
        raise invalid("echo cannot be combined with logprobs: log-probabilities of the prompt are not computed", "echo")
    best_of = fields.integer("best_of")
    if best_of is not None and best_of != generations[0].n:
        raise invalid(f"best_of is {best_of}; only the value of n ({generations[0].n}) is supported", "best_of")
    return request


def _common(fields: _Fields, request_id: str, deadline: float | None, traceparent: str) -> GenerationRequest:
    for name, neutral in _NEUTRAL.items():
        value = fields.body.get(name)
        if value is not None and value not in neutral:
            raise invalid(f"{name} is not supported by this gateway; leave it out", name)
    n = fields.integer("n")
    return GenerationRequest(
        model=fields.text("model"),
        request_id=request_id,
        sampling=Sampling(
            temperature=fields.number("temperature"),
            top_p=fields.number("top_p"),
            top_k=_top_k(fields.integer("top_k")),
            min_p=fields.number("min_p"),
            repetition_penalty=fields.number("repetition_penalty"),
            presence_penalty=fields.number("presence_penalty"),
            frequency_penalty=fields.number("frequency_penalty"),
            seed=_seed(fields.integer("seed")),
        ),
        stop=_stop(fields.body.get("stop")),
        stop_token_ids=_token_ids(fields.body.get("stop_token_ids") or [], "stop_token_ids"),
        ignore_eos=fields.boolean("ignore_eos"),
        json_schema=json_schema_of(fields.body.get("response_format")),
        n=1 if n is None else n,
        deadline=deadline,
        traceparent=traceparent,
        names={"json_schema": schema_field(fields.body.get("response_format"))},
    )


def _api_request(fields: _Fields, chat: bool, generations: list[GenerationRequest], request_id: str) -> ApiRequest:
    stream = fields.boolean("stream")
    options = fields.body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise invalid("stream_options must be an object", "stream_options")
    if options and not stream:
        raise invalid("stream_options needs stream: true", "stream_options")
    stream_options = _Fields(options or {}, "stream_options.")
    return ApiRequest(
        chat=chat,
        model=generations[0].model,
        generations=generations,
        stream=stream,
        include_usage=stream_options.boolean("include_usage"),
        continuous_usage=stream_options.boolean("continuous_usage_stats"),
        echo=False,
        request_id=request_id,
    )


class _Fields:
    """Typed access to a body; null reads as absent. YardError(INVALID) names the field and what it must be."""

    def __init__(self, body: Mapping[str, Any], prefix: str = "") -> None:
        self.body = body
        self._prefix = prefix

    def text(self, name: str) -> str:
        value = self.body.get(name)
        if value is None:
            raise invalid(f"{self._prefix}{name} is missing", self._prefix + name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def integer(self, name: str) -> int | None:
        value = self.body.get(name)
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**64:
            value = int(value)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self._wrong(name, "an integer", value)
        if value is not None and not -(2**63) <= value < 2**64:
            raise invalid(f"{self._prefix}{name} is too large: it must have at most 64 bits", self._prefix + name)
        return value

    def number(self, name: str) -> float | None:
        value = self.body.get(name)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise self._wrong(name, "a number", value)
        try:
            return None if value is None else float(value)
        except OverflowError:
            raise invalid(f"{self._prefix}{name} is too large for a number", self._prefix + name) from None

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def _wrong(self, name: str, wanted: str, value: object) -> Exception:
        return invalid(f"{self._prefix}{name} must be {wanted}, not {_kind(value)}", self._prefix + name)


def _kind(value: object) -> str:
    kinds = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array", dict: "an object"}
    return kinds.get(type(value), "null")


def _top_k(value: int | None) -> int | None:
    return 0 if value == -1 else value  # -1 is what vLLM's clients write for "all"


def _seed(value: int | None) -> int | None:
    """OpenAI's seeds are signed."""
    return None if value is None else value % 2**64


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and len(stops) > MAX_STOP_STRINGS:
        raise too_many(stops, MAX_STOP_STRINGS, "stop")
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("stop must be a string or an array of strings", "stop")
    return tuple(stops)


def _token_ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise invalid(f"{name} must be an array of token ids", name)
    return value


def read_prompts(value: Any, name: str, most: int) -> list[str | list[int]]:
    """A text, token ids, or an array of either."""
    if value is None:
        raise invalid(f"{name} is missing", name)
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise invalid(f"{name} must be a string, an array of strings, an array of token ids, or an array of such arrays", name)
    if type(value[0]) is int:
        return [_token_ids(value, name)]
    if len(value) > most:
        raise invalid(f"{name} has {len(value)} entries; at most {most} are taken in one request", name)
    return [entry if isinstance(entry, str) else _token_ids(entry, name) for entry in value]


def _messages(value: Any) -> Sequence[dict[str, Any]]:
    if value is None:
        raise invalid("messages is missing", "messages")
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        raise too_many(value, MAX_MESSAGES, "messages")
    if not isinstance(value, list) or not value:
        raise invalid("messages must be an array with at least one message", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(f"{name} must be an object with role and content", name)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise invalid(f"{name}.role must be system, user, assistant or tool", f"{name}.role")
    if not within(message, MAX_MESSAGE_DEPTH):
        raise invalid(f"{name} is nested more than {MAX_MESSAGE_DEPTH} levels deep", name)
    check_calls(message, name)
    return {**message, "role": role, "content": _content(message.get("content"), f"{name}.content")}


def _content(content: Any, name: str) -> str:
    """Text, or parts of which all are text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{name} must be a string or an array of parts", name)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise invalid(f"{name}[{index}] is of type {kind!r}; only text is supported", f"{name}[{index}]")
        text = part.get(part["type"])
        if not isinstance(text, str):
            raise invalid(f"{name}[{index}].{part['type']} must be a string", f"{name}[{index}]")
        texts.append(text)
    return "".join(texts)
