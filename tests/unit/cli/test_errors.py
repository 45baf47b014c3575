"""Every failure of `yard` is one line that says what to do, and an exit code by kind; never a traceback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from gateway.api.errors import YardError
from gateway.cli.app import app


def yard(*arguments: str, home: Path, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *arguments],
        capture_output=True,
        text=True,
        input=stdin,
        timeout=60,
        env={**os.environ, "MODELYARD_HOME": str(home), **environment},
    )


def assert_one_line(result: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("yard: ")
    assert result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr


@pytest.mark.parametrize(
    "command", [["ps"], ["get"], ["events"], ["run", "chat", "hello"], ["route", "switch", "chat", "--to", "m"]]
)
def test_no_site_says_how_to_start_one(tmp_path: Path, command: list[str]):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert_one_line(yard(*command, "--server", f"127.0.0.1:{port}", home=tmp_path), 4, f"127.0.0.1:{port}", "yard up", "--server")


def test_the_server_is_taken_from_the_environment(tmp_path: Path):
    assert_one_line(yard("ps", home=tmp_path, MODELYARD_SERVER="127.0.0.1:1"), 4, "127.0.0.1:1")


def test_unknown_kind_suggests_the_nearest(tmp_path: Path):
    assert_one_line(yard("get", "modle", home=tmp_path), 2, "did you mean model?")


def test_rule_14_apply_of_an_unknown_key_fails_before_anything_is_sent(tmp_path: Path):
    text = "apiVersion: modelyard/v1\nkind: Model\nmetadata: {name: m}\nspec: {source: x, replica: 2}\n"
    result = yard("apply", "-f", "-", home=tmp_path, stdin=text)
    assert_one_line(result, 2, "<standard input>:4:19: Model m: spec.replica: unknown key; did you mean 'replicas'?")


def test_apply_of_the_site_document_alone_is_refused(tmp_path: Path):
    text = "apiVersion: modelyard/v1\nkind: Site\nmetadata: {name: s}\n"
    assert_one_line(yard("apply", "-f", "-", home=tmp_path, stdin=text), 2, "no object to apply")


def test_up_with_a_site_directory_that_does_not_exist(tmp_path: Path):
    assert_one_line(yard("up", "--site", str(tmp_path / "nowhere"), home=tmp_path), 2, "no such site directory")


def test_up_on_a_taken_port_starts_nothing(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = yard("up", "--grpc-port", str(port), "--http-port", "0", "--dashboard-port", "0", home=tmp_path)
    assert result.returncode == 4
    assert f"port {port} on 127.0.0.1 is taken by" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "site.json").exists()


def test_up_with_an_unreachable_redis_starts_nothing(tmp_path: Path):
    arguments = ["up", "--grpc-port", "0", "--http-port", "0", "--dashboard-port", "0", "--redis", "redis://127.0.0.1:1/0"]
    result = yard(*arguments, home=tmp_path)
    assert result.returncode == 4
    assert "Redis at redis://127.0.0.1:1/0 is not reachable" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "site.json").exists()


def test_down_where_nothing_runs_is_no_error(tmp_path: Path):
    result = yard("down", home=tmp_path)
    assert (result.returncode, result.stdout) == (0, "nothing was running\n")


def test_a_state_file_that_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "site.json").write_text("{")
    assert_one_line(yard("down", home=tmp_path), 1, "site.json cannot be read")


def test_version_and_schema_print_json(tmp_path: Path):
    assert json.loads(yard("version", "-o", "json", home=tmp_path).stdout)["modelyard"]
    assert json.loads(yard("schema", "model", home=tmp_path).stdout)["properties"]["kind"] == {"const": "Model"}


def test_the_command_starts_fast(tmp_path: Path):
    """A command that only asks must not import Ray, torch or transformers."""
    code = (
        "import sys; sys.argv = ['yard', 'version']\n"
        "from gateway.cli import app\n"
        "import gateway.site.client\n"
        "assert not {'ray', 'torch', 'transformers', 'rich'} & set(sys.modules), sorted(sys.modules)"
    )
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    assert time.monotonic() - began_s < 5


def test_a_key_reaches_the_gateway_and_its_refusal_names_the_option():
    """As an option or from the environment; `yard run` and every other command that asks a gateway."""
    seen: list[dict[str, str]] = []

    def answer(request: object, context: grpc.ServicerContext) -> None:
        seen.append(dict(context.invocation_metadata()))  # type: ignore[arg-type]
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "this site asks for an API key")

    class Everything(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Everything()])
    where = ["--server", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"]
    server.start()
    runner = CliRunner()
    for arguments, environment, sent in (
        (["ps", "--api-key", "k1"], {}, "Bearer k1"),
        (["run", "chat", "hello", "--api-key", "k1"], {"MODELYARD_API_KEY": "k2"}, "Bearer k1"),
        (["get", "models"], {"MODELYARD_API_KEY": "k2"}, "Bearer k2"),
        (["run", "chat", "hello"], {}, None),
    ):
        result = runner.invoke(app, [*arguments, *where], env={"MODELYARD_HOME": "/nowhere", **environment})
        assert isinstance(result.exception, YardError)
        assert "--api-key KEY or MODELYARD_API_KEY" in result.exception.message
        assert seen[-1].get("authorization") == sent
    server.stop(0)
