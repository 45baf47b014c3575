"""The example configurations are valid as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.api.manifest import read_text

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("file", sorted(CONFIGS.rglob("*.yaml")), ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_example_can_be_read(file: Path) -> None:
    assert read_text(file.read_text(encoding="utf-8"), file.name)
