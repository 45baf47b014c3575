from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from trtllm_checkpoint import write_checkpoint
from trtllm_environment import make_environment

MIB = 2**20


@pytest.fixture
def environment(tmp_path: Path) -> Callable[..., Path]:
    """`environment(version, **settings)`: the interpreter of an environment with the stand-in."""

    def make(version: str = "1.4.0rc1", **settings: object) -> Path:
        return make_environment(tmp_path / f"env-{version}", version, **settings)

    return make


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A Hugging Face directory of 4 MiB, of random numbers."""
    return write_checkpoint(tmp_path / "checkpoint")
