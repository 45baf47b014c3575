"""Damage to a file that was derived from another is seen."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.api.checkpoint.seal import damage, remove, seal, seal_of

SIZE = 3 * 2**20


@pytest.fixture
def made(tmp_path: Path) -> Path:
    file = tmp_path / "made"
    file.write_bytes(os.urandom(SIZE))
    seal(file, file)
    return file


def flip(file: Path, at: int, *, keep_time: bool) -> None:
    state = file.stat()
    with file.open("r+b") as stream:
        stream.seek(at)
        [byte] = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))
    if keep_time:
        os.utime(file, ns=(state.st_mtime_ns, state.st_mtime_ns))


@pytest.mark.parametrize("at", [0, 2**20 - 1, SIZE - 1], ids=["header", "head", "tail"])
def test_a_bit_of_the_beginning_or_the_end_is_seen_whatever_the_time_says(made: Path, at: int) -> None:
    assert damage(made) == ""
    flip(made, at, keep_time=True)
    assert damage(made) == "its beginning or its end is not what was written"


def test_a_bit_in_the_middle_is_seen_by_the_time_or_by_every_byte(made: Path) -> None:
    flip(made, SIZE // 2, keep_time=True)
    assert damage(made) == ""
    assert damage(made, every_byte=True) == "its content is not what was written"
    os.utime(made)
    assert damage(made) == "its content is not what was written"


def test_what_was_copied_is_compared_whole_once(made: Path) -> None:
    os.utime(made, ns=(1, 1))
    before = seal_of(made).read_bytes()
    assert damage(made) == ""
    assert seal_of(made).read_bytes() != before, "the next look is cheap again"


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda file: os.truncate(file, SIZE - 1), f"it has {SIZE - 1} bytes and was made with {SIZE}"),
        (lambda file: seal_of(file).unlink(), "its seal is gone"),
        (lambda file: seal_of(file).write_bytes(b"\xff"), "its seal cannot be read"),
        (lambda file: file.unlink(), "it cannot be read: No such file"),
    ],
    ids=["cut", "no seal", "broken seal", "no file"],
)
def test_the_damage_is_said(made: Path, harm: Callable[[Path], object], said: str) -> None:
    harm(made)
    assert said in damage(made)
    remove(made)
    assert not seal_of(made).exists()
