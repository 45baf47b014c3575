"""Functions that clients offer: what models are told of them, and how calls are found in answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lone_gateway import LoneGateway, ids_of
from openai.lib.streaming.chat import ChatCompletionStreamState
from scripted_pool import ScriptedPool, SubmittedSequence

from gateway.api.config import ModelSpec
from gateway.api.errors import ErrorCode, YardError
from gateway.api.json_grammar import grammar_tokenizer, matcher
from gateway.servers.openai_tools import call_schema, use_tools
from gateway.servers.request import GenerationRequest, check_constraint
from gateway.text.model_text import ModelText
from gateway.text.tool_calls import CallDelta, CallReader, ForcedCall, FreeCalls
from gateway.text.tool_prompt import in_text


def function(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **({} if parameters is None else {"parameters": parameters})}}


WEATHER = function("weather", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
TIME = function("time")
USER = {"role": "user", "content": "How is Paris?"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
EARLIER = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
            {"id": "2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
    {"role": "tool", "tool_call_id": "2", "content": "noon"},
]


def read(reader: CallReader, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and (name, arguments) of the calls; `cuts` are lengths of the pieces that come, then the rest."""
    pieces = []
    for cut in cuts:
        pieces.append(text[:cut])
        text = text[cut:]
    content, calls = "", list[list[str]]()
    for piece, last in [*((piece, False) for piece in (*pieces, text)), ("", True)]:
        shown, deltas = reader.read(piece, last=last)
        content += shown
        for delta in deltas:
            if delta.id:
                assert delta.index == len(calls)
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments
    return content, [(name, arguments) for name, arguments in calls]


PARIS = ("weather", '{"city": "Paris"}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("It rains.\n", "It rains.\n", []),
        (CALL, "", [PARIS]),
        (f" I look.\n\n{CALL}\n{CALL}\n", " I look.", [PARIS, PARIS]),
        (f"{CALL}\n Then this.", "Then this.", [PARIS]),
        (CALL.removesuffix("</tool_call>"), "", [PARIS]),
        (f"a <tool <tool_call>nonsense</tool_call> b {CALL}", "a <tool <tool_call>nonsense</tool_call> b", [PARIS]),
        (CALL.replace("weather", "other"), CALL.replace("weather", "other"), []),
        ('<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")]),
        ("<tool_call>\n{", "<tool_call>\n{", []),
    ],
)  # fmt: skip
@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, 9), max_size=30))
def test_calls_are_found_however_the_answer_is_cut(text: str, content: str, calls: list[Any], cuts: list[int]) -> None:
    assert read(FreeCalls(frozenset({"weather", "time"})), text, cuts) == (content, calls)


def test_one_call_at_most_where_parallel_ones_are_not_wanted() -> None:
    assert read(FreeCalls(frozenset({"weather"}), 1), CALL + CALL, [])[1] == [PARIS]


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(1, 9), max_size=30), arguments=st.dictionaries(st.just("a"), st.text('{}"a', max_size=4)))
def test_arguments_of_a_forced_call_come_as_they_are_written(cuts: list[int], arguments: dict[str, str]) -> None:
    written = json.dumps(arguments)
    text = f'{{"name": "weather", "arguments": {written}}}'
    assert read(ForcedCall(), text, cuts) == ("", [("weather", written)])


def test_a_forced_call_that_is_cut_short_keeps_its_id() -> None:
    reader = ForcedCall()
    _, first = reader.read('{"name": "weather", "arguments": {"ci', last=False)
    _, later = reader.read('ty": "P', last=True)
    assert [delta.name for delta in first] == ["weather", ""]
    assert later == [CallDelta(0, 'ty": "P')]


def test_a_template_without_words_for_functions_gets_them_in_messages() -> None:
    messages = [{**message, "content": message["content"] or ""} for message in EARLIER]
    system, user, called, results = in_text(messages, [WEATHER, TIME])
    assert [message["role"] for message in (system, user, called, results)] == ["system", "user", "assistant", "user"]
    assert json.dumps(WEATHER) in system["content"]
    assert called["content"] == f'{CALL}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>'
    assert results["content"] == "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    (merged, _) = in_text([{"role": "system", "content": "Be brief."}, USER], [WEATHER])
    assert merged["content"].startswith("Be brief.\n\nYou may call")


def test_a_template_of_its_own_words_gets_functions_and_arguments_as_objects(byte_level: Path) -> None:
    template = (
        "{{ tools[0].function.name }} as <tool_call>|{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}|{% endfor %}"
    )
    text = ModelText("m", byte_level, eos_ids=(2,), max_context=256, chat_template=template)
    messages = [{**message, "content": message["content"] or ""} for message in EARLIER]
    rendered = text.render_chat(messages, tools=[WEATHER], begin_with="<tool_call>\n")
    assert rendered.text == (
        'weather as <tool_call>|user:How is Paris?|assistant:{"city": "Paris"}{}|tool:rain|tool:noon|<tool_call>\n'
    )


def test_references_of_a_parameters_schema_follow_it_into_the_schema_of_the_call(byte_level: Path) -> None:
    parameters = {"properties": {"at": {"$ref": "#/$defs/place"}, "all": {"$ref": "#"}}, "$defs": {"place": {"type": "string"}}}
    made = json.loads(call_schema([TIME, function("f", parameters)]))
    arguments = made["anyOf"][1]["properties"]["arguments"]
    assert arguments["properties"]["at"]["$ref"] == "#/anyOf/1/properties/arguments/$defs/place"
    assert arguments["properties"]["all"]["$ref"] == "#/anyOf/1/properties/arguments"
    assert arguments["type"] == "object"
    tokens = grammar_tokenizer(byte_level, [2])
    for written, follows in (
        ('{"name": "time", "arguments": {}}', True),
        ('{"name": "f", "arguments": {"at": "x", "all": {"at": "y"}}}', True),
        ('{"name": "f", "arguments": {"at": 1}}', False),
        ('{"name": "f", "arguments": {"all": {"at": 1}}}', False),
        ('{"name": "g", "arguments": {}}', False),
    ):
        ids = ids_of(byte_level, written)
        assert (matcher(tokens, json.dumps(made)).try_consume_tokens(ids) == len(ids)) == follows, written


@pytest.fixture
async def client(lone: LoneGateway, pool: ScriptedPool) -> AsyncIterator[openai.AsyncOpenAI]:
    lone.observe(pool, context=2048)
    async with openai.AsyncOpenAI(base_url=f"{lone.http}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def submitted(pool: ScriptedPool, byte_level: Path) -> list[SubmittedSequence]:
    """What came to the pool. It answers `CALL`; what is held to one begins after the tag."""
    seen: list[SubmittedSequence] = []

    def answer(sequence: SubmittedSequence) -> None:
        seen.append(sequence)
        forced = sequence.submit.sampling.json_schema
        text = CALL.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>") if forced else f"I look.\n{CALL}"
        for token in ids_of(byte_level, text):
            sequence.tokens([token])
        sequence.end("stop", stop_token_id=2)

    pool.script = answer
    return seen


@pytest.mark.parametrize(
    ("choice", "content"),
    [("auto", "I look."), ("required", None), ({"type": "function", "function": {"name": "weather"}}, None)],
)
async def test_whole_and_streamed_calls_are_alike(
    client: openai.AsyncOpenAI, submitted: list[SubmittedSequence], byte_level: Path, choice: Any, content: str | None
) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": [USER], "tools": [TIME, WEATHER], "tool_choice": choice}
    whole = (await client.chat.completions.create(**asked)).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == content
    assert [(call.function.name, call.function.arguments) for call in whole.message.tool_calls] == [PARIS]
    puts_together = ChatCompletionStreamState()
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        puts_together.handle_chunk(chunk)
    last = puts_together.get_final_completion().choices[0]
    assert last.finish_reason == "tool_calls"
    assert (last.message.content or None) == content
    call = (last.message.tool_calls or [])[0]
    assert (call.function.name, call.function.arguments) == PARIS
    assert call.id.startswith("call_")
    held = submitted[0].submit.sampling.json_schema
    begun = ids_of(byte_level, "<|im_start|>assistant\n" + ("<tool_call>\n" if held else ""))
    assert list(submitted[0].submit.prompt_ids)[-len(begun) :] == begun
    able = [one["properties"]["name"]["const"] for one in json.loads(held)["anyOf"]] if held else []
    assert able == {"auto": [], "required": ["time", "weather"]}.get(str(choice), ["weather"])


async def test_results_of_calls_go_back_and_no_tool_may_be_chosen(
    client: openai.AsyncOpenAI, submitted: list[SubmittedSequence], byte_level: Path
) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": EARLIER, "tools": [WEATHER], "tool_choice": "none"}
    answer = (await client.chat.completions.create(**asked)).choices[0]
    assert answer.message.content == f"I look.\n{CALL}"
    assert (answer.message.tool_calls, answer.finish_reason) == (None, "stop")
    ids = list(submitted[0].submit.prompt_ids)
    shown = ids_of(byte_level, "<tool_response>\nrain\n</tool_response>")
    assert any(ids[at : at + len(shown)] == shown for at in range(len(ids)))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "weather"}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [WEATHER, function("a b")]}, "tools[1].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [function("f", {"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [WEATHER], "tool_choice": "often"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [WEATHER], "logprobs": True}, "logprobs"),
        ({"tools": [WEATHER], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"messages": [USER, {"role": "tool", "content": "rain"}]}, "messages[1].tool_call_id"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": {}}]}, "messages[1].tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[]"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {
                "tools": [TIME, function("f", {"properties": {"x": {"type": "y"}}})],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            "tools[1].function.parameters",
        ),
    ],
)  # fmt: skip
async def test_errors_name_the_field(client: openai.AsyncOpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**{"model": "m", "messages": [USER], **fields})
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("spec", "choice", "field"),
    [
        ({"source": "file:/m", "engine": "trtllm"}, "auto", None),
        ({"source": "file:/m", "engine": "trtllm"}, "required", "tool_choice"),
        ({"source": "openai+http://10.0.0.1:8000/v1#m"}, "auto", "tools"),
    ],
)
def test_what_an_engine_cannot_do_names_the_field(spec: dict[str, Any], choice: str, field: str | None) -> None:
    request = GenerationRequest("m", "id", messages=[USER])
    use_tools({"tools": [WEATHER], "tool_choice": choice}, request)
    with contextlib.nullcontext() if field is None else pytest.raises(YardError) as refused:
        check_constraint(request, ModelSpec.model_validate(spec))
    if refused is not None:
        assert (refused.value.code, refused.value.field) == (ErrorCode.UNIMPLEMENTED, field)
