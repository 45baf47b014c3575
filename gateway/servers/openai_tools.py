"""OpenAI's `tools` and `tool_choice`, and the calls in earlier messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gateway.api.errors import invalid
from gateway.api.nesting import within
from gateway.servers.choice_stream import ChoiceDelta
from gateway.servers.request import GenerationRequest, too_many
from gateway.text.tool_calls import CallReader, ForcedCall, FreeCalls
from gateway.text.tool_prompt import BEGIN

MAX_TOOLS = 128
MAX_CALLS = 128
_MOST_DEEP = 64
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(slots=True)
class ToolUse:
    """How the answers of one request are read. One for each exchange."""

    make_reader: Callable[[], CallReader]
    _readers: dict[int, CallReader] = field(default_factory=dict)
    _called: set[int] = field(default_factory=set)

    def read(self, news: list[ChoiceDelta]) -> list[ChoiceDelta]:
        """The same with calls in place of their text; what has nothing to show yet is left out."""
        shown = []
        for delta in news:
            reader = self._readers.get(delta.index) or self._readers.setdefault(delta.index, self.make_reader())
            delta.text, calls = reader.read(delta.text, last=bool(delta.finish_reason))
            delta.calls = tuple(calls)
            if calls:
                self._called.add(delta.index)
            if delta.finish_reason == "stop" and delta.index in self._called:
                delta.finish_reason = "tool_calls"
            if delta.text or delta.calls or delta.finish_reason:
                shown.append(delta)
        return shown


def use_tools(body: dict[str, Any], generation: GenerationRequest) -> ToolUse | None:
    """Enters into the generation what `tools` and `tool_choice` ask for. None: its answer is text only."""
    tools = _tools(body.get("tools"))
    choice = _choice(body.get("tool_choice"), tools)
    parallel = body.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise invalid("parallel_tool_calls must be true or false", "parallel_tool_calls")
    if not tools or choice == "none":
        return None
    if generation.json_schema:
        raise invalid("response_format and tools exclude each other: leave one out, or choose no tool", "response_format")
    if generation.logprobs is not None:
        raise invalid("logprobs are not given of answers that may call tools: leave one of the two out", "logprobs")
    generation.tools = tools
    if choice == "auto":
        names = frozenset(tool["function"]["name"] for tool in tools)
        return ToolUse(partial(FreeCalls, names, 1 if parallel is False else None))
    able = tools if choice == "required" else [tool for tool in tools if tool["function"]["name"] == choice]
    generation.json_schema = call_schema(able)
    generation.begin_with = f"{BEGIN}\n"
    where = f"tools[{tools.index(able[0])}].function.parameters" if len(able) == 1 else "tools"
    generation.names |= {"json_schema": where, "constraint": "tool_choice"}
    return ToolUse(ForcedCall)


def call_schema(tools: list[dict[str, Any]]) -> str:
    """Of one call of one of them, as JSON."""
    return json.dumps({"anyOf": [_call_of(tool["function"], index) for index, tool in enumerate(tools)]}, ensure_ascii=False)


def _call_of(function: dict[str, Any], index: int) -> dict[str, Any]:
    parameters = _moved(function.get("parameters") or {"properties": {}}, f"#/anyOf/{index}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": {**parameters, "type": "object"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, to: str) -> Any:
    """A schema that lies at `to` of another one: what it refers to in itself is there now."""
    if isinstance(schema, list):
        return [_moved(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, to) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved


def _tools(value: Any) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid("tools must be an array of functions", "tools")
    if len(value) > MAX_TOOLS:
        raise too_many(value, MAX_TOOLS, "tools")
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(value)]
    names = [tool["function"]["name"] for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid(f"tools[{index}].function.name {name!r} is there twice", f"tools[{index}].function.name")
    return tools


def _tool(tool: Any, name: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise invalid(f"{name}.type must be function", f"{name}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{name}.function must be an object with a name", f"{name}.function")
    _check_name(function.get("name"), f"{name}.function.name")
    if not isinstance(function.get("description"), str | None):
        raise invalid(f"{name}.function.description must be a string", f"{name}.function.description")
    parameters = function.get("parameters")
    where = f"{name}.function.parameters"
    if parameters is not None and (not isinstance(parameters, dict) or parameters.get("type", "object") != "object"):
        raise invalid(f"{where} must be a JSON schema of type object", where)
    if not within(parameters, _MOST_DEEP):
        raise invalid(f"{where} is nested more than {_MOST_DEEP} levels deep", where)
    kept = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
    return {"type": "function", "function": kept}


def _choice(value: Any, tools: list[dict[str, Any]]) -> str:
    """none, auto, required, or a function's name."""
    if value is None:
        return "auto" if tools else "none"
    if isinstance(value, dict):
        function = value.get("function")
        name = function.get("name") if value.get("type") == "function" and isinstance(function, dict) else None
        if not isinstance(name, str):
            raise invalid("tool_choice must be none, auto, required, or name a function", "tool_choice")
        if name not in [tool["function"]["name"] for tool in tools]:
            raise invalid(f"tool_choice names {name!r}, which is not among tools", "tool_choice.function.name")
        return name
    if value not in ("none", "auto", "required"):
        raise invalid("tool_choice must be none, auto, required, or name a function", "tool_choice")
    if value != "none" and not tools:
        raise invalid(f"tool_choice is {value} and there are no tools", "tool_choice")
    return value


def check_calls(message: dict[str, Any], name: str) -> None:
    """Of a message: the calls that an assistant made, and which of them a result is of."""
    if message["role"] == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise invalid(
            f"{name}.tool_call_id must be a string: the id of the call that this is the result of", f"{name}.tool_call_id"
        )
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list) or message["role"] != "assistant":
        raise invalid(f"{name}.tool_calls must be an array, in a message of the assistant", f"{name}.tool_calls")
    if len(calls) > MAX_CALLS:
        raise too_many(calls, MAX_CALLS, f"{name}.tool_calls")
    for index, call in enumerate(calls):
        _check_call(call, f"{name}.tool_calls[{index}]")


def _check_call(call: Any, name: str) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise invalid(f"{name} must be an object with id, type function and a function", name)
    _check_name(function.get("name"), f"{name}.function.name")
    where = f"{name}.function.arguments"
    arguments = function.get("arguments")
    try:
        is_object = isinstance(arguments, str) and isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise invalid(f"{where} must be a JSON object, written as a string", where)


def _check_name(value: Any, where: str) -> None:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise invalid(f"{where} must have 1 to 64 letters, digits, _ or -", where)
