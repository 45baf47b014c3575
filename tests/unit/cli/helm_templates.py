"""As much of Helm as the chart uses: values, `if`, `range`, `define` and `include`, and a handful of functions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

_TAG = re.compile(r"{{(-?)\s*(.*?)\s*(-?)}}", re.DOTALL)
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s()|]+|[()|]')


def render(chart: Path, release: str, **changes: Any) -> list[dict[str, Any]]:
    """The chart's objects, with top-level values replaced by `changes`."""
    values = {**yaml.safe_load((chart / "values.yaml").read_text()), **changes}
    root = {"Values": values, "Release": {"Name": release}}
    parts: dict[str, list[Any]] = {}
    for file in sorted((chart / "templates").glob("*.tpl")):
        _run(_parse(file.read_text()), root, root, parts)
    texts = [_run(_parse(file.read_text()), root, root, parts) for file in sorted((chart / "templates").glob("*.yaml"))]
    return [item for text in texts for item in yaml.safe_load_all(text) if item]


def _parse(text: str) -> list[Any]:
    """Nested lists: text, expressions, and blocks as (word, condition, body, otherwise)."""
    tokens, end = [], 0
    for match in _TAG.finditer(text):
        before = text[end : match.start()]
        tokens += [("text", before.rstrip() if match[1] else before), ("tag", match[2])]
        end = match.end()
        if match[3]:
            end += len(text[end:]) - len(text[end:].lstrip())
    tokens.append(("text", text[end:]))
    body, stack = [], []
    for kind, content in tokens:
        word = content.split()[0] if kind == "tag" and content.split() else ""
        if kind == "text":
            body.append(content)
        elif word in ("if", "range", "define"):
            stack.append((body, word, content.removeprefix(word).strip(), None))
            body = []
        elif word == "else":
            outer, opened, condition, _ = stack.pop()
            stack.append((outer, opened, condition, body))
            body = []
        elif word == "end":
            outer, opened, condition, first = stack.pop()
            outer.append((opened, condition, body if first is None else first, [] if first is None else body))
            body = outer
        else:
            body.append(("say", content, [], []))
    assert not stack, "a block without its end"
    return body


def _run(body: list[Any], dot: Any, root: Any, parts: dict[str, list[Any]]) -> str:
    out = []
    for item in body:
        if isinstance(item, str):
            out.append(item)
            continue
        word, text, inner, otherwise = item
        if word == "define":
            parts[json.loads(text)] = inner
        elif word == "if":
            out.append(_run(inner if _value(text, dot, root, parts) else otherwise, dot, root, parts))
        elif word == "range":
            out += [_run(inner, each, root, parts) for each in _value(text, dot, root, parts)]
        else:
            out.append(str(_value(text, dot, root, parts)))
    return "".join(out)


def _value(text: str, dot: Any, root: Any, parts: dict[str, list[Any]]) -> Any:
    words = _WORD.findall(text)

    def pipeline() -> Any:
        value = call([])
        while words and words[0] == "|":
            words.pop(0)
            value = call([value])
        return value

    def call(last: list[Any]) -> Any:
        first = operand()
        arguments = []
        while words and words[0] not in ("|", ")"):
            arguments.append(operand())
        return apply(first, [*arguments, *last]) if callable(first) else first

    def apply(function: Any, arguments: list[Any]) -> Any:
        return function(*arguments)

    def operand() -> Any:
        word = words.pop(0)
        if word == "(":
            value = pipeline()
            assert words.pop(0) == ")"
            return value
        if word.startswith('"'):
            return json.loads(word)
        if word.isdigit():
            return int(word)
        if word.startswith((".", "$")):
            value = root if word.startswith("$") else dot
            for name in word.lstrip("$").split(".")[1:]:
                value = value[name] if name else value
            return value
        return functions[word]

    functions = {
        "quote": lambda value: json.dumps(str(value)),
        "toJson": json.dumps,
        "int": int,
        "printf": lambda form, *values: form % values,
        "indent": lambda count, block: "\n".join(" " * count + line for line in block.split("\n")),
        "include": lambda name, context: _run(parts[name], context, root, parts).strip("\n"),
    }
    return pipeline()
