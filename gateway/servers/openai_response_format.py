"""OpenAI's `response_format`: text, any JSON object, or JSON that follows a schema."""

from __future__ import annotations

import json
from typing import Any

from gateway.api.errors import invalid
from gateway.api.nesting import within

_FIELD = "response_format"
_MOST_DEEP = 64


def json_schema_of(value: Any) -> str:
    """The schema as JSON; empty: the answer is free. Answers follow it whether or not `strict` is set."""
    if value is None:
        return ""
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            return ""
        case "json_object":
            return '{"type": "object"}'
        case "json_schema":
            return _schema(value.get("json_schema"))
        case _:
            raise invalid(f"{_FIELD}.type must be text, json_object or json_schema", f"{_FIELD}.type")


def schema_field(value: Any) -> str:
    """What is named where the schema is wrong, or cannot be followed."""
    given = isinstance(value, dict) and value.get("type") == "json_schema"
    return f"{_FIELD}.json_schema.schema" if given else _FIELD


def _schema(value: Any) -> str:
    schema = value.get("schema") if isinstance(value, dict) else None
    name = f"{_FIELD}.json_schema"
    if not isinstance(schema, dict):
        raise invalid(f"{name}.schema must be an object: the JSON schema of the answer", f"{name}.schema")
    if not within(schema, _MOST_DEEP):
        raise invalid(f"{name}.schema is nested more than {_MOST_DEEP} levels deep", f"{name}.schema")
    return json.dumps(schema, ensure_ascii=False)
