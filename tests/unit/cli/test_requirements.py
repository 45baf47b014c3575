"""Packages that are not what Modelyard asks for are named, with what to run, instead of a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.site import doctor
from gateway.site.requirements import explanation, remedy, unmet


def other_version(directory: Path, package: str, module: str, error: str, version: str = "1.2.3") -> None:
    """A package that is found before the installed one, and breaks when it is imported."""
    (directory / f"{package}-{version}.dist-info").mkdir(parents=True)
    (directory / f"{package}-{version}.dist-info" / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
    (directory / f"{module}.py").write_text(f"raise {error}\n")


def yard(directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", "ps"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path, "MODELYARD_HOME": str(directory), **environment},
    )


def test_what_is_installed_meets_what_is_asked_for() -> None:
    assert unmet() == []
    assert explanation() == ""


def test_each_requirement_that_is_not_met_is_named() -> None:
    asked = ["typer<0.1", "no-such-thing[extra]>=3", "pytest", "colorama>99; sys_platform == 'win32'", "ruff>99; extra == 'test'"]
    old, absent = unmet(asked)
    assert str(old).endswith("is installed, Modelyard needs <0.1")
    assert str(absent) == "no-such-thing is not installed, Modelyard needs >=3"
    assert remedy([old, absent]) == f"run `{sys.executable} -m pip install 'typer<0.1' 'no-such-thing[extra]>=3'`"


def test_a_command_that_cannot_import_a_package_says_which_version_it_needs(tmp_path: Path) -> None:
    other_version(tmp_path, "grpcio", "grpc", "TypeError('Descriptors cannot\\n be created')")
    result = yard(tmp_path)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith("yard: grpcio 1.2.3 is installed, Modelyard needs ")
    assert f"run `{sys.executable} -m pip install 'grpcio" in result.stderr
    assert "Traceback" in yard(tmp_path, MODELYARD_DEBUG="1").stderr


def test_a_broken_package_of_the_right_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "grpc.py").write_text("raise ImportError('libgrpc.so is\\n gone')\n")
    result = yard(tmp_path)
    assert result.stderr.startswith("yard: cannot start: ImportError: libgrpc.so is gone; remove .venv and run `./yard` again")
    assert result.stderr.count("\n") == 1


def test_doctor_names_each_requirement_that_is_not_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_version(tmp_path, "protobuf", "unused", "ImportError()", "6.33.0")
    monkeypatch.syspath_prepend(tmp_path)
    good, bad = doctor._packages()
    assert (good.verdict, bad.verdict) == ("good", "bad")
    assert "protobuf" not in good.text
    assert bad.text.startswith("protobuf 6.33.0 is installed, Modelyard needs")
    assert "pip install 'protobuf" in bad.advice
