"""rule 14: unknown keys in a config are errors with file, line and the nearest known key.

Duplicate names and alias collisions are errors, too.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gateway.api.config import ModelSpec, RouteSpec
from gateway.api.errors import ErrorCode, YardError
from gateway.api.manifest import read, read_text
from gateway.site.site_files import DEFAULT_SITE, read_site

MODEL = """\
apiVersion: modelyard/v1
kind: Model
metadata:
  name: small
spec:
  source: file:/models/small.gguf
"""


def errors_of(text: str) -> list[str]:
    with pytest.raises(YardError) as caught:
        read_text(text, "x.yaml")
    assert caught.value.code is ErrorCode.INVALID
    return caught.value.message.splitlines()


def test_reads_several_documents_of_a_file_in_order():
    documents = read_text(MODEL + "---\n# nothing here\n---\n" + MODEL.replace("small", "large"), "x.yaml")
    assert [document.key for document in documents] == [("Model", "small"), ("Model", "large")]
    assert documents[1].where.line == 10
    assert isinstance(documents[0].manifest.spec, ModelSpec)
    assert documents[0].plain["spec"] == {"source": "file:/models/small.gguf"}


def test_rule_14_unknown_key_names_file_line_column_and_the_nearest_key():
    assert errors_of(MODEL + "  tensor_paralel: 2\n") == [
        "x.yaml:7:3: Model small: spec.tensor_paralel: unknown key; did you mean 'tensor_parallel'?"
    ]


def test_rule_14_unknown_key_in_a_nested_mapping_is_compared_with_the_keys_of_that_mapping():
    assert errors_of(MODEL + "  limits:\n    concurency: 2\n") == [
        "x.yaml:8:5: Model small: spec.limits.concurency: unknown key; did you mean 'concurrency'?"
    ]


def test_rule_14_unknown_key_in_a_list_item():
    text = "apiVersion: modelyard/v1\nkind: Route\nmetadata: {name: r}\nspec:\n  targets:\n    - model: a\n      wieght: 3\n"
    assert errors_of(text) == ["x.yaml:7:7: Route r: spec.targets[0].wieght: unknown key; did you mean 'weight'?"]


def test_rule_14_unknown_key_beside_spec():
    assert "x.yaml:5:1: Model: spce: unknown key; did you mean 'spec'?" in errors_of(MODEL.replace("spec:", "spce:"))


def test_rule_14_unknown_kind_suggests_the_nearest():
    [error] = errors_of(MODEL.replace("kind: Model", "kind: Modle"))
    assert error.startswith(
        "x.yaml:2:1: document: kind: input should be 'Model', 'Route', 'Pool', 'Tenant' or 'Site', not 'Modle'"
    )
    assert error.endswith("did you mean 'Model'?")


def test_rule_14_duplicate_key_in_a_mapping_names_the_first():
    assert errors_of(MODEL + "  source: other\n") == ["x.yaml:7:3: key 'source' is here a second time; it was first on line 6"]


def test_rule_14_duplicate_name_across_files_names_both_places(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(MODEL)
    (tmp_path / "b.yml").write_text("\n" + MODEL)
    with pytest.raises(YardError) as caught:
        read([tmp_path])
    assert caught.value.message == (
        f"{tmp_path}/b.yml:2:1: Model 'small' is here a second time; it was first at {tmp_path}/a.yaml:1:1"
    )


ROUTE = """\
---
apiVersion: modelyard/v1
kind: Route
metadata: {{name: {name}}}
spec: {{targets: [{{model: small}}], aliases: [{alias}]}}
"""


@pytest.mark.parametrize("alias", ["small", "other", "other-alias"])
def test_rule_14_alias_that_is_already_a_name_is_an_error(alias: str):
    [error] = errors_of(MODEL + ROUTE.format(name="other", alias="other-alias") + ROUTE.format(name="mine", alias=alias))
    assert f"alias '{alias}' of Route mine is already" in error


def test_same_name_in_two_kinds_is_no_collision():
    route = "---\napiVersion: modelyard/v1\nkind: Route\nmetadata: {name: small}\nspec: {targets: [{model: small}]}\n"
    documents = read_text(MODEL + route, "x.yaml")
    assert isinstance(documents[1].manifest.spec, RouteSpec)


def test_wrong_types_say_what_was_expected_and_what_stands_there():
    [error] = errors_of(MODEL + "  tensor_parallel: many\n")
    assert error.startswith("x.yaml:7:3: Model small: spec.tensor_parallel: input should be a valid integer")
    assert " or input should be 'auto', not 'many'" in error


def test_a_size_with_a_wrong_unit_shows_how_to_write_one():
    assert errors_of(MODEL + "  kv:\n    floor: 3Gib\n") == [
        "x.yaml:8:5: Model small: spec.kv.floor: '3Gib' is not a size; write for example 512MiB, 1.5GiB or 24GB"
    ]


def test_a_missing_key_is_named_at_its_mapping():
    assert errors_of(MODEL.replace("  source: file:/models/small.gguf\n", "  replicas: 1\n")) == [
        "x.yaml:5:1: Model small: spec.source: is missing"
    ]


def test_all_errors_of_all_documents_are_reported_together():
    lines = errors_of(MODEL + "  a: 1\n---\n" + MODEL.replace("small", "large") + "  replicas: -1\n")
    assert len(lines) == 2
    assert lines[0].startswith("x.yaml:7:3:")
    assert lines[1].startswith("x.yaml:15:3: Model large: spec.replicas: input should be greater than or equal to 0")


def test_broken_yaml_is_named_with_its_line():
    [error] = errors_of(MODEL + "  limits: [1\n")
    assert error.startswith("x.yaml:8:1: not valid YAML:")


def test_a_document_that_is_no_mapping_is_refused():
    assert errors_of("- 1\n") == ["x.yaml:1:1: a document must be a mapping with apiVersion, kind, metadata and spec"]


def test_yaml_cannot_make_python_objects():
    """rule 15: nothing in a file is ever executed."""
    [error] = errors_of(MODEL + "  chat_template: !!python/object/apply:os.getcwd []\n")
    assert "not valid YAML" in error or "spec.chat_template" in error


def test_a_file_that_does_not_exist_and_an_empty_directory_are_errors(tmp_path: Path):
    with pytest.raises(YardError) as caught:
        read([tmp_path, tmp_path / "absent.yaml"])
    assert caught.value.message.splitlines() == [
        f"{tmp_path}: holds no .yaml or .yml file",
        f"{tmp_path}/absent.yaml: no such file or directory",
    ]


def test_the_default_site_is_valid_and_applied_in_the_order_that_references_need():
    site = read_site(DEFAULT_SITE, {}, None)
    kinds = [document.manifest.kind for document in site.documents]
    assert kinds == sorted(kinds, key=("Pool", "Model", "Route", "Tenant").index)
    assert site.default_route == "chat"
    assert site.replicas() == {"smollm2": 1, "smollm2-pp2": 1}
    models = {name for document in site.documents if (name := document.manifest.name) in site.replicas()}
    for document in site.documents:
        if isinstance(document.manifest.spec, RouteSpec):
            assert {target.model for target in document.manifest.spec.targets} <= models


def test_command_line_overrides_the_site_file():
    site = read_site(DEFAULT_SITE, {"grpc_port": 0, "http_port": None}, "redis://elsewhere:6379/0", 3)
    assert (site.spec.listen.grpc_port, site.spec.listen.http_port) == (0, 8000)
    assert (site.spec.redis, site.spec.gateways) == ("redis://elsewhere:6379/0", 3)


def test_a_wrong_override_names_its_option():
    for given, gateways, message in (
        ({"grpc_port": 99999}, None, "--grpc-port: 99999 is above 65535"),
        ({"http_port": -1}, None, "--http-port: -1 is below 0"),
        ({}, 100000, "--gateways: 100000 is above 64"),
    ):
        with pytest.raises(YardError) as caught:
            read_site(DEFAULT_SITE, given, None, gateways)
        assert caught.value.message == message


def test_aliases_that_mean_billions_of_values_are_refused_at_once() -> None:
    """Each line nine times the one before: 500 bytes that would be 43 million values."""
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
    bomb += "".join(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 8))
    began_s = time.thread_time()
    with pytest.raises(YardError, match="aliases") as caught:
        read_text(bomb, "bomb.yaml")
    assert time.thread_time() - began_s < 1.0
    assert caught.value.code is ErrorCode.INVALID
    assert "bomb.yaml:" in caught.value.message


@pytest.mark.parametrize(
    "text",
    ["[" * 3000, "a: " + "1" * 6000, "a: 2020-13-45", "a: &a [*a]", "a: !!timestamp z", "a: !!bool maybe", "\x00", "a: !!int x"],
)
def test_odd_yaml_is_an_error_with_its_place_and_nothing_else(text: str) -> None:
    with pytest.raises(YardError, match=r"odd\.yaml"):
        read_text(text, "odd.yaml")


@pytest.mark.parametrize(
    ("source", "more", "error"),
    [
        ("openai+http://trt:8000/v1#llama", "pools: [a]", "pools has no meaning for a server that runs elsewhere"),
        ("openai+http://trt:8000/v1#llama", "tensor_parallel: 2", "tensor_parallel has no meaning"),
        ("openai+http://trt:8000/v1#llama", "kv: {floor: 1GiB}", "kv has no meaning"),
        ("openai+http://trt:8000/v1#llama", "limits: {batch_tokens: 64}", "limits.batch_tokens has no meaning"),
        ("openai+http://trt:8000/v1#llama", "replicas: 2", "replicas: a server is one replica"),
        ("openai+http://trt:8000/v1#llama", "chat_template: x", "chat_template: the server uses its own"),
        ("openai+http://trt:8000/v1#llama", "server: {ca: /x.pem}", "server.ca: the source is without TLS"),
        ("openai+http://trt:8000/v1#llama", "server: {key_env: A, key_file: b}", "key_env and key_file; name one"),
        ("openai+http://me:pw@trt/v1#llama", "replicas: 1", "it must hold no credentials"),
        ("http://trt:8000/v1", "replicas: 1", "http:// is not known; a server that runs elsewhere is openai+http://"),
        ("openai+http:///v1", "replicas: 1", "it names no host and port"),
        ("openai+http://trt:x/v1", "replicas: 1", "source: Port could not be cast"),
        ("openai+http://trt/v1?x=1", "replicas: 1", "it has a query"),
        ("trtllm+grpc://trt:50051", "replicas: 1", "tokenizer: a trtllm+grpc server takes token ids only"),
        ("trtllm+grpc://trt:50051/v1", "tokenizer: /x", "takes a host and a port only"),
        ("trtllm+grpc://trt", "tokenizer: /x", "it names no host and port"),
        ("file:/models/small.gguf", "tokenizer: /models/small", "tokenizer is for a source that is a server"),
        ("file:/models/small.gguf", "server: {silent_s: 5}", "server is for a source that is a server"),
    ],
)
def test_rule_14_what_a_server_that_runs_elsewhere_cannot_have_is_named(source: str, more: str, error: str) -> None:
    [found] = errors_of(MODEL.replace("file:/models/small.gguf", f'"{source}"') + f"  {more}\n")
    assert found.startswith("x.yaml:")
    assert error in found


def test_a_server_that_runs_elsewhere_is_a_source() -> None:
    text = MODEL.replace("file:/models/small.gguf", '"openai+https://trt.example/v1#llama-70b"')
    spec = read_text(text + "  limits: {concurrency: 64}\n  context: 8192\n", "x.yaml")[0].manifest.spec
    assert isinstance(spec, ModelSpec)
    assert not spec.is_managed
    address = spec.address
    assert address is not None
    assert (address.base_url, address.model) == ("https://trt.example:443/v1", "llama-70b")
