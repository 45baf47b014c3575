"""The JSON schema of every kind, for editors and other tools; `yard schema --write` brings this directory up to date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gateway.api.config import API_VERSION, SPECS, Metadata

DIRECTORY = Path(__file__).parent
ALL = "modelyard"


def schema(kind: str) -> dict[str, Any]:
    """JSON schema (draft 2020-12) of one whole document of `kind`. KeyError for a kind that does not exist."""
    spec = SPECS[kind].model_json_schema(mode="validation")
    definitions = spec.pop("$defs", {})
    metadata = Metadata.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": kind,
        "type": "object",
        "additionalProperties": False,
        "required": ["apiVersion", "kind", "metadata", *(["spec"] if spec.get("required") else [])],
        "properties": {
            "apiVersion": {"const": API_VERSION},
            "kind": {"const": kind},
            "metadata": metadata,
            "spec": spec,
        },
        "$defs": definitions,
    }


def schema_of_all() -> dict[str, Any]:
    """One schema for a file that mixes kinds."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Modelyard document",
        "oneOf": [{"$ref": f"{kind.lower()}.json"} for kind in SPECS],
    }


def files() -> dict[str, str]:
    """File name in this directory -> the content that it must have."""
    documents = {f"{kind.lower()}.json": schema(kind) for kind in SPECS} | {f"{ALL}.json": schema_of_all()}
    return {name: json.dumps(document, indent=2) + "\n" for name, document in documents.items()}
