"""Renders a conversation into a prompt the way the model was trained to read it.

The environment is the one that Hugging Face chat templates are written against: sandboxed Jinja with `raise_exception`,
`strftime_now`, an unescaped `tojson` and the `generation` block.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.api.errors import YardError, invalid
from gateway.text.tool_prompt import writes_calls


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; here it is just its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One model's template. YardError(INVALID) when it does not parse, or refuses a conversation."""

    def __init__(self, source: str, special_tokens: dict[str, str], *, model: str) -> None:
        self._model = model
        self._special_tokens = special_tokens
        self.writes_calls = writes_calls(source)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise invalid(
                f"model `{model}`: its chat template does not parse ({error}); set spec.chat_template to one that does"
            ) from error

    def render(self, messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]] | None = None) -> str:
        """The prompt up to where the assistant's answer begins."""
        try:
            return self._template.render(
                messages=list(messages), tools=list(tools) if tools else None, add_generation_prompt=True, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> YardError:
        return invalid(f"model `{self._model}`: its chat template refuses these messages: {error}", field="messages")
