from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_checkpoints import save_random


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    """Directory of a random checkpoint by family name, made on first use."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = save_random(family, tmp_path_factory.mktemp("checkpoints") / family)
        return made[family]

    return get


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")
