"""The digest of a checkpoint's files: what canary answers, converted tokenizers and caches are keyed by."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from tempfile import NamedTemporaryFile

from gateway.api.errors import invalid


def content_digest(files: tuple[Path, ...], cache_dir: Path) -> str:
    """SHA-256 in hex: of the file's content, or for several files of their names and digests.

    Remembered in the cache directory by path, size and modification time, since hashing reads every byte.
    """
    digests = [_file_digest(file, cache_dir) for file in files]
    if len(files) == 1:
        return digests[0]
    lines = sorted(f"{file.name} {digest}\n" for file, digest in zip(files, digests, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def write_atomically(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=".new-", delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def _file_digest(path: Path, cache_dir: Path) -> str:
    state = path.stat()
    key = {"path": str(path.resolve()), "size": state.st_size, "mtime_ns": state.st_mtime_ns}
    memo = cache_dir / "digests" / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
    try:
        known = json.loads(memo.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}  # absent, or another process is replacing a broken one: hash again
    if isinstance(known, dict) and {name: known.get(name) for name in key} == key and "sha256" in known:
        return str(known["sha256"])
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise invalid(f"{path}: cannot be read ({error.strerror}); correct its permissions or copy it again") from error
    write_atomically(memo, json.dumps({**key, "sha256": digest}))
    return digest
