"""The house as a tree, one line a file, in ARCHITECTURE.md: `python ops/house_tree.py --write` brings it up to date.

The line of a module is the first sentence of its docstring, so that it is written where it is read and cannot go stale.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- tree: made by ops/house_tree.py -->\n", "<!-- end of tree -->\n"
GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
LINES = {
    "yard": "The command: makes .venv on the first call, then hands over to gateway.cli; `yard test` runs checks and tests.",
    ".ci/run": "What CI runs: `./yard test`.",
    "pyproject.toml": "Dependencies as compatible ranges, and the settings of ruff, pyright and pytest.",
    "gateway/api/proto/inference.proto": "The service that internal clients call; self-contained, to be copied.",
    "gateway/api/proto/admin.proto": "The service that ops call, through `yard` or their own tools.",
    "ops/kubernetes/facts/rayservice-v1.json": "The schema of KubeRay's operator, without descriptions.",
    "gateway/servers/capacity.html": "The page `/capacity`: one file, nothing to build. Asks for `capacity.json` once a second.",
    "gateway/api/proto/pool.proto": "Gateway to pool driver, and controller to pool driver.",
}


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    files = {Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()}
    return sorted(files, key=lambda file: (file.parts[:-1], file.name))


def line_of(file: Path) -> str:
    """What the file is for; empty when nothing says it."""
    if (known := LINES.get(str(file))) is not None:
        return known
    text = (ROOT / file).read_text(errors="replace")
    if file.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].replace("\n", " ")
    if file.suffix in (".yaml", ".yml", ".lua"):
        comments = [line.lstrip("#- ").strip() for line in text.splitlines() if line.startswith(("#", "--"))]
        return next((line for line in comments if line and "$schema" not in line), "")
    if file.suffix == ".md":
        return text.splitlines()[0].lstrip("# ")
    return ""


def tree() -> str:
    lines = ["```"]
    shown: tuple[str, ...] = ()
    for file in tracked_files():
        if file.name.endswith(GENERATED) or (file.name == "__init__.py" and not line_of(file)):
            continue
        folders = file.parts[:-1]
        if folders != shown:
            shown = folders
            if folders:
                lines.append(f"{'/'.join(folders)}/")
        indent = "  " if folders else ""
        lines.append(f"{indent}{file.name:<28}{line_of(file)}".rstrip())
    return "\n".join([*lines, "```\n"])


def replaced(document: str) -> str:
    before, rest = document.split(BEGIN)
    return f"{before}{BEGIN}{tree()}{END}{rest.split(END)[1]}"


def main() -> int:
    document = DOCUMENT.read_text()
    if "--write" in sys.argv:
        DOCUMENT.write_text(replaced(document))
        return 0
    if replaced(document) != document:
        print("ARCHITECTURE.md does not show the tree as it is; run `python ops/house_tree.py --write`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
