"""What a derived file was when it was made, kept beside it as `NAME.seal`, so that damage is seen and the file is made anew.

Every use compares size, time of the last write, beginning (with the header) and end, which costs about a millisecond. Where
the time says that somebody wrote or copied it since, every byte is compared, once; `yard doctor` compares every byte always.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

import msgspec

from gateway.api.checkpoint.digest import write_atomically

_HEAD_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16


class _Seal(msgspec.Struct, frozen=True):
    bytes: int
    mtime_ns: int
    ends_sha256: str
    sha256: str


def seal(made: Path, name: Path) -> None:
    """Remember `made`, which will be renamed to `name` next. OSError."""
    state = made.stat()
    _write(name, _Seal(state.st_size, state.st_mtime_ns, _ends(made), _whole(made)))


def damage(file: Path, *, every_byte: bool = False) -> str:
    """Empty when `file` is what was sealed, else what is wrong with it. Looks anew at each call; raises nothing."""
    try:
        known = msgspec.json.decode(seal_of(file).read_bytes(), type=_Seal)
    except FileNotFoundError:
        return "it was not finished, or its seal is gone"
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        return f"its seal cannot be read: {error}"
    try:
        state = file.stat()
        if state.st_size != known.bytes:
            return f"it has {state.st_size} bytes and was made with {known.bytes}"
        if _ends(file) != known.ends_sha256:
            return "its beginning or its end is not what was written"
        touched = state.st_mtime_ns != known.mtime_ns
        if (touched or every_byte) and _whole(file) != known.sha256:
            return "its content is not what was written"
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    if touched:
        with suppress(OSError):  # then every byte is compared the next time, too
            _write(file, msgspec.structs.replace(known, mtime_ns=state.st_mtime_ns))
    return ""


def remove(file: Path) -> None:
    """The file and its seal. Who has it mapped keeps it. OSError."""
    file.unlink(missing_ok=True)
    seal_of(file).unlink(missing_ok=True)


def seal_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.seal")


def _write(file: Path, content: _Seal) -> None:
    write_atomically(seal_of(file), msgspec.json.encode(content).decode())


def _ends(file: Path) -> str:
    with file.open("rb") as stream:
        digest = hashlib.sha256(stream.read(_HEAD_BYTES))
        stream.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        digest.update(stream.read(_TAIL_BYTES))
    return digest.hexdigest()


def _whole(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
