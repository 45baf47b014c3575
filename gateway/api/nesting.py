"""How deep plain data from outside is nested: whoever walks it later calls itself for each level."""

from __future__ import annotations

from typing import Any


def within(value: Any, levels: int) -> bool:
    """Whether it has at most so many levels of arrays and objects."""
    if isinstance(value, dict):
        return levels > 0 and all(within(part, levels - 1) for part in value.values())
    return not isinstance(value, list) or (levels > 0 and all(within(part, levels - 1) for part in value))
