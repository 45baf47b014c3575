"""Where a site keeps its files on this machine.

`.modelyard/` beside the `yard` script (or $MODELYARD_HOME) holds one site: its state file, secrets, Valkey's data, caches
and logs. Sockets need short paths, so they and Ray's session live in a private directory of /tmp.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from gateway.api.errors import ErrorCode, YardError, invalid

HOME_VARIABLE = "MODELYARD_HOME"
RUN_VARIABLE = "MODELYARD_RUN"
"""Set in the environment of everything that a site starts; marks processes that outlived their parents."""
_ROOMY_BYTES = 1 << 30


class Secrets(msgspec.Struct, frozen=True):
    """Made once for a home. Never printed (rule 15)."""

    site: str
    valkey: str

    def __repr__(self) -> str:
        return "Secrets(...)"


@dataclass(frozen=True, slots=True)
class Home:
    path: Path

    @classmethod
    def from_environment(cls) -> Home:
        return cls(Path(os.environ.get(HOME_VARIABLE) or ".modelyard").absolute())

    @property
    def state_file(self) -> Path:
        return self.path / "site.json"

    @property
    def applied_file(self) -> Path:
        """What `yard up` last applied from the site directory."""
        return self.path / "applied.json"

    @property
    def last_site_file(self) -> Path:
        """Name of the site that `yard down` stopped last."""
        return self.path / "last_site"

    @property
    def last_listen_file(self) -> Path:
        """Where the site of the last `yard up` listened."""
        return self.path / "last_listen.json"

    @property
    def valkey_dir(self) -> Path:
        return self.path / "valkey"

    @property
    def cache_dir(self) -> Path:
        return self.path / "cache"

    @property
    def logs_dir(self) -> Path:
        return self.path / "logs"

    @property
    def ray_token_file(self) -> Path:
        return self.path / "ray_token"

    def last_site(self) -> str:
        """The site that `yard down` stopped last in this home; empty when none was."""
        try:
            return self.last_site_file.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    @property
    def run_dir(self) -> Path:
        """Short, so that the Unix sockets below it stay under the 107 bytes the kernel allows."""
        digest = hashlib.sha256(str(self.path).encode()).hexdigest()[:8]
        return Path("/tmp") / f"yard-{os.getuid()}-{digest}"

    @property
    def shared_memory_dir(self) -> Path:
        """What CPU ranks share. Open MPI leaves its segments behind when its processes are killed."""
        return Path("/dev/shm") / self.run_dir.name

    @property
    def head_dir(self) -> Path:
        """What Ray's head process knows. It has to outlive that process, not the machine, and each write is synchronised: it is
        in shared memory, but for containers that have hardly any."""
        roomy = shutil.disk_usage("/dev/shm").total >= _ROOMY_BYTES
        return (self.shared_memory_dir if roomy else self.temporary_dir) / "head"

    @property
    def temporary_dir(self) -> Path:
        """TMPDIR of everything that the site starts."""
        return self.run_dir / "tmp"

    def create(self) -> None:
        """Makes the directories, for this user only. YardError when that fails or somebody else owns the run directory."""
        try:
            for directory in (self.path, self.valkey_dir, self.cache_dir, self.logs_dir):
                directory.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
            self.run_dir.mkdir(mode=0o700, exist_ok=True)
            found = self.run_dir.lstat()
        except OSError as error:
            raise YardError(ErrorCode.INTERNAL, f"cannot make {error.filename}: {error.strerror}; set {HOME_VARIABLE}") from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise invalid(f"{self.run_dir} is not a directory of this user; remove it or set {HOME_VARIABLE} to another home")
        self.run_dir.chmod(0o700)
        for directory in (self.temporary_dir, self.shared_memory_dir):
            directory.mkdir(mode=0o700, exist_ok=True)

    @contextmanager
    def held(self, what: str) -> Iterator[None]:
        """One `yard up`, `down` or `upgrade` at a time. YardError(CONFLICT) when another works on this home."""
        lock = FileLock(self.path / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise YardError(
                ErrorCode.CONFLICT,
                f"another yard command is starting or stopping the site in {self.path}; {what} when it is done",
            ) from error
        try:
            yield
        finally:
            lock.release()

    def clear_run_dirs(self) -> None:
        """Removes sockets and temporary files of a site that is down. Ray's session with its logs stays until the next start."""
        for directory in (self.temporary_dir, self.shared_memory_dir):
            shutil.rmtree(directory, ignore_errors=True)
        if self.run_dir.is_dir():
            for path in self.run_dir.rglob("*"):
                if path.is_socket():
                    path.unlink(missing_ok=True)

    def secrets(self) -> Secrets:
        """Reads the home's secrets; makes them, and Ray's token, the first time."""
        file = self.path / "secrets.json"
        if not self.ray_token_file.exists():
            write_private(self.ray_token_file, secrets.token_hex(32).encode())
        if not file.exists():
            write_private(file, msgspec.json.encode(Secrets(site=secrets.token_urlsafe(32), valkey=secrets.token_urlsafe(32))))
        try:
            return msgspec.json.decode(file.read_bytes(), type=Secrets)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise YardError(
                ErrorCode.INTERNAL,
                f"{file} cannot be read ({error}); put it back from a copy, or remove it: then `yard down` and `yard up` go on "
                "with a new one",
            ) from error


def write_private(file: Path, content: bytes) -> None:
    """Replaces `file` in one step, readable by its owner only."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
