"""ARCHITECTURE.md shows the tree as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tree_in_the_architecture_is_the_tree() -> None:
    checked = subprocess.run([sys.executable, str(ROOT / "ops" / "house_tree.py")], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
