"""ARCHITECTURE.md shows the tree, the states and the rules as they are."""

from __future__ import annotations

import ast
import re
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


def test_each_rule_has_a_test_that_names_it() -> None:
    named: set[int] = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for numbers in re.findall(r"[Rr]ules? (\d+(?:(?:, | and |, and )\d+)*)", ast.get_docstring(node) or ""):
                    named.update(map(int, re.findall(r"\d+", numbers)))
    rules = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("\n## Rules\n")[1].split("\n## ")[0]
    assert named >= set(map(int, re.findall(r"^(\d+)\. ", rules, flags=re.MULTILINE))) == set(range(1, 18))
