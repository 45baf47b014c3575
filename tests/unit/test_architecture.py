"""ARCHITECTURE.md shows the tree and the states as they are."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", ["house_tree.py", "state_machine.py"])
def test_what_is_drawn_in_the_architecture_is_what_there_is(script: str) -> None:
    checked = subprocess.run([sys.executable, str(ROOT / "ops" / script)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports test files by their base name, and cannot collect two of one."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("*.py") if file.name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []
