"""The published JSON schema is the configuration that the code accepts."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml

from gateway.api import schema
from gateway.api.config import SPECS
from gateway.site.site_files import DEFAULT_SITE


@pytest.mark.parametrize("name", list(schema.files()))
def test_committed_files_are_current(name: str):
    assert (schema.DIRECTORY / name).read_text() == schema.files()[name], "run `yard schema --write` and commit"


def test_no_stale_file_lies_beside_them():
    assert {path.name for path in schema.DIRECTORY.glob("*.json")} == set(schema.files())


@pytest.mark.parametrize("kind", list(SPECS))
def test_each_is_a_valid_schema(kind: str):
    jsonschema.Draft202012Validator.check_schema(schema.schema(kind))


def test_the_default_site_matches_its_schema():
    for file in DEFAULT_SITE.glob("*.yaml"):
        for document in yaml.safe_load_all(file.read_text()):
            jsonschema.validate(document, schema.schema(document["kind"]))


def test_sizes_are_numbers_or_text_with_a_unit():
    pool = {"apiVersion": "modelyard/v1", "kind": "Pool", "metadata": {"name": "a"}}
    for memory in (1024, "3GiB", "1.5 GiB", "24GB"):
        jsonschema.validate({**pool, "spec": {"memory": memory}}, schema.schema("Pool"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**pool, "spec": {"memory": "3Gib"}}, schema.schema("Pool"))


def test_unknown_keys_are_refused_at_every_level():
    """rule 14 in editors, too."""

    def objects(node: object):
        if isinstance(node, dict):
            if node.get("type") == "object" and "properties" in node:
                yield node
            for value in node.values():
                yield from objects(value)
        elif isinstance(node, list):
            for value in node:
                yield from objects(value)

    for kind in SPECS:
        for found in objects(json.loads(json.dumps(schema.schema(kind)))):
            assert found.get("additionalProperties") is False, (kind, found.get("title"))
