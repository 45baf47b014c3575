"""Documents as ops read them."""

from __future__ import annotations

import difflib
from typing import Any

import yaml


def yaml_diff(before: dict[str, Any] | None, after: dict[str, Any] | None, name: str) -> str:
    """Unified diff of two documents as YAML; empty when they are equal. None: absent."""
    old, new = (yaml.safe_dump(document, sort_keys=False).splitlines() if document else [] for document in (before, after))
    labels = (name if before else "absent", name if after else "absent")
    return "\n".join(difflib.unified_diff(old, new, fromfile=labels[0], tofile=labels[1], lineterm=""))
