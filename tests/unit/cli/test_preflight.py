"""`yard up` fails early, with one clear error, when something stands in its way."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gateway.api.errors import ErrorCode, YardError
from gateway.api.manifest import read_text
from gateway.site import preflight
from gateway.site.home import Home

MIB = 1 << 20


def test_a_taken_port_names_who_holds_it_and_the_option_that_changes_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(YardError) as caught:
            preflight.check_ports("127.0.0.1", {"grpc-port": port})
    message = caught.value.message
    assert f"port {port} on 127.0.0.1 is taken by" in message
    assert f"pid {os.getpid()}" in message
    assert "--grpc-port" in message


def test_a_port_held_with_reuse_is_taken_too():
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(YardError, match="is taken by"):
            preflight.check_ports("127.0.0.1", {"http-port": taken.getsockname()[1]})


def test_free_ports_and_any_port_pass():
    preflight.check_ports("127.0.0.1", {"grpc-port": 0, "http-port": 0, "dashboard-port": 0})


def test_two_services_on_one_port_are_refused():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(YardError, match="must differ"):
        preflight.check_ports("127.0.0.1", {"grpc-port": port, "http-port": port})


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(YardError, match=r"cannot listen on 203\.0\.113\.1"):
        preflight.check_ports("203.0.113.1", {"grpc-port": 50051})


def test_a_full_disk_names_the_directory_and_what_is_needed(tmp_path: Path):
    with pytest.raises(YardError) as caught:
        preflight.check_disk(tmp_path, tmp_path, home_bytes=1 << 62)
    assert caught.value.code is ErrorCode.EXHAUSTED
    assert str(tmp_path) in caught.value.message
    assert "MODELYARD_HOME" in caught.value.message
    preflight.check_disk(tmp_path, tmp_path, home_bytes=1, run_bytes=1)


def test_a_pool_larger_than_the_machine_names_its_document():
    text = "apiVersion: modelyard/v1\nkind: Pool\nmetadata: {name: big}\nspec: {devices: 2, memory: 900TiB}\n"
    with pytest.raises(YardError, match=r"pool\.yaml:1:1: Pool big wants 2 × "):
        preflight.check_memory(read_text(text, "pool.yaml"))


def test_pools_that_are_too_large_together_are_named():
    half = psutil.virtual_memory().total * 6 // 10
    text = "---\n".join(
        f"apiVersion: modelyard/v1\nkind: Pool\nmetadata: {{name: {name}}}\nspec: {{memory: {half}}}\n" for name in ("a", "b")
    )
    with pytest.raises(YardError, match=r"Pool b wants 1 × .* beside the .* GiB of the others"):
        preflight.check_memory(read_text(text, "pool.yaml"))


async def test_an_unreachable_redis_is_named_without_its_password():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(YardError) as caught:
        await preflight.check_redis(f"redis://user:hunter2@127.0.0.1:{port}/0")
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert f"redis://127.0.0.1:{port}/0" in caught.value.message
    assert "hunter2" not in caught.value.message  # rule 15: secrets are never logged


async def test_a_url_of_an_unknown_scheme_is_bad_input():
    with pytest.raises(YardError) as caught:
        await preflight.check_redis("http://127.0.0.1/0")
    assert caught.value.code is ErrorCode.INVALID


def test_a_corrupt_model_file_is_named_with_its_document(tmp_path: Path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 64)
    text = f"apiVersion: modelyard/v1\nkind: Model\nmetadata: {{name: m}}\nspec: {{source: 'file:{broken}'}}\n"
    with pytest.raises(YardError) as caught:
        preflight.check_models(read_text(text, "models.yaml"), tmp_path)
    assert caught.value.message.startswith("models.yaml:1:1: Model m: ")
    assert str(broken) in caught.value.message


def test_a_model_that_is_not_installed_is_named(tmp_path: Path):
    text = "apiVersion: modelyard/v1\nkind: Model\nmetadata: {name: m}\nspec: {source: 'package:no_such_package_here'}\n"
    with pytest.raises(YardError, match="no_such_package_here"):
        preflight.check_models(read_text(text, "models.yaml"), tmp_path)


def test_the_holder_of_a_free_port_is_nobody_known():
    assert preflight.holder(0) == "another process"
    assert sys.platform == "linux"


def test_a_ray_that_does_not_listen_is_named_at_once():
    with pytest.raises(YardError, match=r"no Ray at 127\.0\.0\.1:1: .*--ray-address"):
        preflight.check_ray("127.0.0.1:1")
    with pytest.raises(YardError, match="HOST:PORT"):
        preflight.check_ray("somewhere")


def test_two_commands_do_not_start_or_stop_one_site_at_once(made_home: Home) -> None:
    home = made_home
    with (
        home.held("try again"),
        pytest.raises(YardError, match="another yard command is starting or stopping the site"),
        home.held("wait"),
    ):
        raise AssertionError("both hold it")
    with home.held("try again"):
        pass


def test_the_holder_of_a_port_is_told_in_one_short_line() -> None:
    lines = ["import socket, sys", "taken = socket.create_server(('127.0.0.1', 0))"]
    lines += ["print(taken.getsockname()[1], flush=True)", "sys.stdin.read()"]
    command = [sys.executable, "-c", "\n".join(lines)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = preflight.holder(int(process.stdout.readline()))
        process.communicate("")
    assert f"pid {process.pid}" in told
    assert "\n" not in told
    assert len(told.partition(": ")[2]) <= 82
