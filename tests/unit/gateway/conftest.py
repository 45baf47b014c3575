from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import tokenizer_files
from lone_gateway import LoneGateway
from scripted_pool import ScriptedPool


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_files.byte_level(tmp_path_factory.mktemp("byte-level"))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_files.sentencepiece(tmp_path_factory.mktemp("sentencepiece"))


@pytest.fixture(scope="session")
def word_piece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_files.word_piece(tmp_path_factory.mktemp("word-piece"))


@pytest.fixture
async def pool() -> ScriptedPool:
    return ScriptedPool("a", ["m"])


@pytest.fixture
async def lone(tmp_path: Path, byte_level: Path, pool: ScriptedPool) -> AsyncIterator[LoneGateway]:
    """One gateway, one pool `a`, one model `m` with byte-level tokens."""
    lone = LoneGateway(tmp_path, {"m": byte_level})
    try:
        yield await lone.start(pool)
    finally:
        await lone.stop()


@pytest.fixture
async def other(lone: LoneGateway) -> ScriptedPool:
    """A second pool with the same model."""
    other = ScriptedPool("b", ["m"])
    await other.start()
    lone.observe(other)
    await lone.wait_up("b")
    return other
