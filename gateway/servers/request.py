"""A request for tokens, as all public surfaces hand it to the one generation path, and the checks that it must pass."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.api.config import ModelSpec
from gateway.api.errors import ErrorCode, YardError, invalid
from gateway.api.proto.pool_pb2 import SamplingParams

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_MESSAGES = 8192
MAX_LOGPROBS = 20
MAX_SCHEMA_CHARACTERS = 64 * 1024
MAX_REQUEST_ID_CHARACTERS = 256
UINT64 = 2**64


@dataclass(slots=True)
class Sampling:
    """None takes the model's own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None


@dataclass(slots=True)
class GenerationRequest:
    """`deadline` is on the clock of the running loop. `names` maps our field names to the surface's own, for error messages."""

    model: str
    request_id: str
    prompt: str | None = None
    prompt_ids: Sequence[int] | None = None
    messages: Sequence[dict[str, Any]] | None = None
    tools: Sequence[dict[str, Any]] | None = None  # functions that the model may call, as OpenAI writes them
    begin_with: str = ""  # what the answer begins with; the model goes on from there, and clients do not get it
    add_special_tokens: bool = True
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    return_token_ids: bool = False
    json_schema: str = ""  # JSON; what the answer must follow
    deadline: float | None = None
    traceparent: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)  # lower case: who asks, and what routes look at
    embed: bool = False  # the prompt's vector is wanted, of a model that makes some
    shadow: bool = False  # a copy of another request
    names: dict[str, str] = field(default_factory=dict)

    def named(self, name: str) -> str:
        return self.names.get(name, name)


@dataclass(frozen=True, slots=True)
class _Range:
    """What a sampling value may be, and 0 besides where that switches it off. Engines compute with 32 bit, in which smaller or
    larger values would become 0, infinite, or too coarse to compute with; so that is how they are compared."""

    lowest: float
    highest: float
    or_zero: bool = False

    def holds(self, value: float) -> bool:
        near = float32(value)
        return (self.or_zero and value == 0) or float32(self.lowest) <= near <= float32(self.highest)

    def __str__(self) -> str:
        return f"{'0, or ' if self.or_zero else ''}from {self.lowest:g} to {self.highest:g}"


_RANGES = {
    "temperature": _Range(1e-6, 100.0, or_zero=True),
    "top_p": _Range(1e-9, 1.0),
    "min_p": _Range(1e-9, 1.0, or_zero=True),
    "repetition_penalty": _Range(0.01, 100.0),
    "presence_penalty": _Range(-2.0, 2.0),
    "frequency_penalty": _Range(-2.0, 2.0),
}
_INTEGER_RANGES = {"top_k": (0, 2**31 - 1), "seed": (0, UINT64 - 1)}


def float32(value: float) -> float:
    """What is left of a number in 32 bit; infinite when it is too large for it."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def check(request: GenerationRequest) -> None:
    """All that can be checked before the model's tokenizer is at hand. YardError(INVALID) names the field."""
    if not request.model:
        raise invalid("model is empty: name a route or a model", "model")
    if request.prompt is None and request.prompt_ids is None and request.messages is None:
        raise invalid("there is no prompt: send text or token ids", request.named("prompt"))
    if request.messages is not None:
        check_messages(request.messages)
    if len(request.request_id) > MAX_REQUEST_ID_CHARACTERS or not (
        request.request_id.isascii() and request.request_id.isprintable()
    ):
        raise invalid(f"request_id must be at most {MAX_REQUEST_ID_CHARACTERS} printable ASCII characters", "request_id")
    _check_counts(request)
    for name, allowed in _RANGES.items():
        value = getattr(request.sampling, name)
        if value is not None and not allowed.holds(value):
            raise invalid(f"{request.named(name)} is {value:g}; it must be {allowed}", request.named(name))
    for name, (lowest, highest) in _INTEGER_RANGES.items():
        value = getattr(request.sampling, name)
        if value is not None and not lowest <= value <= highest:
            raise invalid(f"{request.named(name)} is {value}; it must be from {lowest} to {highest}", request.named(name))


def too_many(values: Sequence[Any], most: int, name: str) -> YardError:
    return invalid(f"{name} has {len(values)} entries; at most {most} are taken in one request", name)


def check_messages(messages: Sequence[dict[str, Any]]) -> None:
    if not messages:
        raise invalid("messages is empty: send at least one", "messages")
    if not all(message.get("role") for message in messages):
        raise invalid("a message has no role: use system, user, assistant or tool", "messages.role")


def _check_counts(request: GenerationRequest) -> None:
    if not 1 <= request.n <= MAX_CHOICES:
        raise invalid(f"{request.named('n')} is {request.n}; it must be 1 to {MAX_CHOICES}", request.named("n"))
    if request.max_tokens is not None and request.max_tokens < 1:
        name = request.named("max_tokens")
        raise invalid(f"{name} is {request.max_tokens}; it must be 1 or more", name)
    if len(request.stop) > MAX_STOP_STRINGS:
        raise too_many(request.stop, MAX_STOP_STRINGS, "stop")
    if len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise too_many(request.stop_token_ids, MAX_STOP_TOKEN_IDS, "stop_token_ids")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in request.stop):
        raise invalid(f"each stop string must have 1 to {MAX_STOP_CHARACTERS} characters", "stop")
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
        name = request.named("logprobs")
        raise invalid(f"{name} is {request.logprobs}; it must be 0 to {MAX_LOGPROBS}", name)


def check_kind(request: GenerationRequest, *, embeds: bool) -> None:
    if embeds and not request.embed:
        raise invalid(
            f"model `{request.model}` makes embeddings and writes no text: ask for embeddings, or another model", "model"
        )
    if request.embed and not embeds:
        raise invalid(f"model `{request.model}` writes text and makes no embeddings; ask a model that does", "model")


def check_constraint(request: GenerationRequest, spec: ModelSpec) -> None:
    """What can be said of a JSON schema, and of functions, before a model is asked."""
    if request.tools and not spec.is_managed:
        text = f"tools are not offered to servers that run elsewhere (model `{request.model}`): ask it itself, or another model"
        raise YardError(ErrorCode.UNIMPLEMENTED, text, field="tools")
    if not request.json_schema:
        return
    name = request.names.get("constraint") or request.named("json_schema")
    if request.embed or not spec.is_managed or spec.engine != "torch":
        what = "embeddings" if request.embed else f"engine `{spec.engine}`" if spec.is_managed else "servers that run elsewhere"
        text = f"{name} is not supported by {what} (model `{request.model}`); leave it out, or ask a model of engine `torch`"
        raise YardError(ErrorCode.UNIMPLEMENTED, text, field=name)
    if request.ignore_eos:
        raise invalid(f"ignore_eos and {name} exclude each other: the answer ends where its JSON ends", "ignore_eos")
    if len(request.json_schema) > MAX_SCHEMA_CHARACTERS:
        name = request.named("json_schema")
        raise invalid(f"{name} has a schema of more than {MAX_SCHEMA_CHARACTERS} characters", name)


def check_ids(ids: Sequence[int], vocabulary_size: int, name: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocabulary_size):
        wrong = next(token for token in ids if not 0 <= token < vocabulary_size)
        raise invalid(f"{name} has the id {wrong}; this model's ids are 0 to {vocabulary_size - 1}", name)


def check_length(request: GenerationRequest, characters: int, max_characters: int) -> None:
    """Refuses a text that cannot fit whatever its tokens are, before time is spent on it."""
    if characters > max_characters:
        name = request.named("messages" if request.messages is not None else "prompt")
        raise invalid(f"the prompt has {characters} characters, more than the context of model `{request.model}` holds", name)


def answer_budget(request: GenerationRequest, prompt_tokens: int, max_context: int) -> int:
    """How many tokens the answer may have. YardError(INVALID) when prompt and answer do not fit the context."""
    name = request.named("messages" if request.messages is not None else "prompt")
    if prompt_tokens == 0:
        raise invalid("the prompt has no tokens: send at least one character", name)
    room = max_context - prompt_tokens
    if room < 1:
        raise invalid(
            f"the prompt has {prompt_tokens} tokens and model `{request.model}` takes {max_context} for prompt and answer; "
            "shorten the prompt",
            name,
        )
    if request.max_tokens is None:
        return room
    if request.max_tokens > room:
        name = request.named("max_tokens")
        raise invalid(
            f"the prompt has {prompt_tokens} tokens and {name} is {request.max_tokens}; model `{request.model}` takes "
            f"{max_context} together, so {name} can be at most {room}",
            name,
        )
    return request.max_tokens


def resolved_sampling(request: GenerationRequest, defaults: dict[str, Any], rng: random.Random) -> SamplingParams:
    """Explicit values, else those of the model's generation config that can be computed with, else the neutral ones of
    inference.proto."""

    def value(name: str, neutral: float) -> float:
        explicit = getattr(request.sampling, name)
        if explicit is not None:
            return explicit
        own = defaults.get(name)
        allowed = _RANGES.get(name)
        return own if isinstance(own, int | float) and (allowed is None or allowed.holds(own)) else neutral

    seed = request.sampling.seed
    return SamplingParams(
        json_schema=request.json_schema,
        temperature=value("temperature", 1.0),
        top_p=value("top_p", 1.0),
        top_k=max(0, min(int(value("top_k", 0)), 2**31 - 1)),
        min_p=value("min_p", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        presence_penalty=value("presence_penalty", 0.0),
        frequency_penalty=value("frequency_penalty", 0.0),
        seed=rng.getrandbits(64) if seed is None else seed,
        logprobs=-1 if request.logprobs is None else request.logprobs,
    )
