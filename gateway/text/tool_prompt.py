"""Functions that a model may call, and earlier calls and their results, as its chat template is told of them.

Templates that write calls as `<tool_call>{json}</tool_call>` (Hermes, Qwen) say so in their own words. All others get the same
format in the system message, so that one format is read from every model (`tool_calls`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"

_PREFACE = """You may call functions to help with the request. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

To call a function, write its name and arguments as a JSON object within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


def writes_calls(template: str) -> bool:
    """Whether a template has words of its own for functions, in the format that is read."""
    return "tools" in template and BEGIN in template


def with_objects(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates of their own words: arguments of calls as objects, which they write as JSON."""
    return [
        {**message, "tool_calls": [_as_object(call) for call in message["tool_calls"]]} if message.get("tool_calls") else message
        for message in messages
    ]


def in_text(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """For all other templates: functions in the system message, calls in the assistant's text, results in a user's."""
    told: list[dict[str, Any]] = []
    of_results = False  # the last one
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if of_results:
                told[-1] = {"role": "user", "content": f"{told[-1]['content']}\n{result}"}
            else:
                told.append({"role": "user", "content": result})
        elif message.get("tool_calls"):
            parts = [content] if content else []
            parts += [f"{BEGIN}\n{_json(_as_object(call)['function'])}\n{END}" for call in message["tool_calls"]]
            told.append({"role": message["role"], "content": "\n".join(parts)})
        else:
            told.append(message)
        of_results = message["role"] == "tool"
    if not tools:
        return told
    preface = _PREFACE.format(tools="\n".join(map(_json, tools)))
    if told and told[0]["role"] == "system":
        return [{**told[0], "content": f"{told[0]['content']}\n\n{preface}"}, *told[1:]]
    return [{"role": "system", "content": preface}, *told]


def _as_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {"name": function["name"], "arguments": json.loads(function["arguments"] or "{}")}}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
