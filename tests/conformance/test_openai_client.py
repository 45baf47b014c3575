"""The official `openai` client, unchanged, against a running site."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from house import House

pytestmark = pytest.mark.site

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(house: House) -> openai.OpenAI:
    house.wait_ready("smollm2", "smollm2-pp2")
    return openai.OpenAI(base_url=f"{house.http_url}/v1", api_key="none", max_retries=0, timeout=60)


def test_models_lists_routes_and_models(client: openai.OpenAI) -> None:
    assert {"chat", "balanced", "smollm2", "smollm2-pp2"} <= {model.id for model in client.models.list()}


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="chat", messages=MESSAGES, max_tokens=16, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_chat_is_the_same_text_and_ends_with_usage(client: openai.OpenAI) -> None:
    """Rule 17: every chunk's usage when asked."""
    whole = client.chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=24, temperature=0)
    stream = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_stop_strings_never_leak(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=24, temperature=0, stop=["Paris"])
    assert "Par" not in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_n_choices_and_seed(client: openai.OpenAI) -> None:
    def ask() -> list[str]:
        answer = client.completions.create(
            model="smollm2", prompt="Once upon a time", max_tokens=8, n=3, seed=11, temperature=1.0
        )
        return [choice.text for choice in answer.choices]

    first = ask()
    assert len(set(first)) > 1
    assert ask() == first


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for token in logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert max(top.logprob for top in token.top_logprobs) == pytest.approx(token.logprob, abs=1e-4)


def test_errors_are_openais(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="smollm2", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"


def test_an_answer_held_to_a_schema_is_json_of_it(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
        "required": ["city", "large"],
        "additionalProperties": False,
    }
    for model in ("smollm2", "smollm2-pp2"):
        stream = client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            max_tokens=48,
            temperature=1.0,
            seed=4,
            stream=True,
            response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
        )
        choices = [chunk.choices[0] for chunk in stream if chunk.choices]
        answer = json.loads("".join(choice.delta.content or "" for choice in choices))
        assert answer.keys() == {"city", "large"}
        assert isinstance(answer["large"], bool)
        assert choices[-1].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="Invalid type: city") as bad:
        client.chat.completions.create(
            model="smollm2",
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": {"type": "city"}}},
        )
    assert bad.value.param == "response_format.json_schema.schema"


def test_any_json_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Paris as JSON, with one key, name."}],
        max_tokens=64,
        temperature=0,
        response_format={"type": "json_object"},
    )
    choice = answer.choices[0]
    text = choice.message.content or ""
    assert text.startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(text), dict)


def test_calls_of_functions(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"$ref": "#/$defs/unit"}},
        "required": ["city", "unit"],
        "additionalProperties": False,
        "$defs": {"unit": {"enum": ["celsius", "fahrenheit"]}},
    }
    asked: Any = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [
            {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
            {"type": "function", "function": {"name": "get_weather", "description": "In a city.", "parameters": parameters}},
        ],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "temperature": 0,
        "max_tokens": 64,
    }
    choice = client.chat.completions.create(**asked).choices[0]
    call = (choice.message.tool_calls or [])[0]
    assert call.type == "function"
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "get_weather")
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"city", "unit"}
    assert arguments["unit"] in ("celsius", "fahrenheit")
    streamed = ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.function is not None
            streamed += delta.function.arguments or ""
    assert streamed == call.function.arguments
    told = [*asked["messages"], choice.message, {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"}]
    answer = client.chat.completions.create(**{**asked, "messages": told, "tool_choice": "auto"}).choices[0]
    assert answer.message.content or answer.message.tool_calls
