"""ARCHITECTURE.md shows the tree and the states as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", ["house_tree.py", "state_machine.py"])
def test_what_is_drawn_in_the_architecture_is_what_there_is(script: str) -> None:
    checked = subprocess.run([sys.executable, str(ROOT / "ops" / script)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
