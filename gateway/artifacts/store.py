"""Artifacts by their key, in a directory that may be a network mount: made once, by one maker, and found by all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from gateway.api.trtllm.manifest import Manifest, read_manifest, write_manifest


class ArtifactStore:
    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, manifest: Manifest) -> Path:
        return self._root / f"{manifest.kind}-{manifest.key}"

    def find(self, manifest: Manifest) -> Path | None:
        """Where it is, if it was made of the same inputs."""
        path = self.path(manifest)
        return path if read_manifest(path) is not None else None

    def get(self, manifest: Manifest, make: Callable[[Path], None]) -> tuple[Path, bool]:
        """(its directory, whether it was made now). Others that want the same wait for the one that makes it.

        `make` fills an empty directory, which takes its place as a whole: what fails or is killed leaves nothing that looks done.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        path = self.path(manifest)
        with FileLock(f"{path}.lock"):
            if self.find(manifest) is not None:
                return path, False
            shutil.rmtree(path, ignore_errors=True)
            part = Path(tempfile.mkdtemp(prefix=f"{path.name}.", dir=self._root))
            try:
                make(part)
                write_manifest(part, manifest)
                part.chmod(0o755)
                part.rename(path)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
        return path, True
