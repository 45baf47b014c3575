"""Options that ask for a picture: whether one can be drawn is known before the work that it shows."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from gateway.api.errors import invalid


def check(option: str, file: Path | None) -> None:
    """YardError without matplotlib (extra `chart`), or without the file's directory. `file` None: no picture is asked for."""
    if file is None:
        return
    if find_spec("matplotlib") is None:
        raise invalid(f"{option} needs matplotlib: `.venv/bin/pip install -e '.[chart]'`, or leave {option} out")
    if not file.parent.is_dir():
        raise invalid(f"{option} {file}: no such directory: {file.parent}")
