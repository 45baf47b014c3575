"""Whether the installed packages are what Modelyard asks for. Asked when an import has failed, so it needs only `packaging`."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Unmet:
    requirement: str  # as pip takes it
    name: str
    installed: str  # empty: it is not
    needed: str

    def __str__(self) -> str:
        found = f"{self.name} {self.installed} is installed" if self.installed else f"{self.name} is not installed"
        return f"{found}, Modelyard needs {self.needed}" if self.needed else found


def unmet(requirements: Iterable[str] | None = None) -> list[Unmet]:
    """Of these requirements (default: of the installed Modelyard) without any extras, those that are not met."""
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion

    found = []
    for text in importlib.metadata.requires("modelyard") or () if requirements is None else requirements:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = importlib.metadata.version(wanted.name) or ""
            if installed and wanted.specifier.contains(installed, prereleases=True):
                continue
        except importlib.metadata.PackageNotFoundError:
            installed = ""
        except InvalidVersion:
            installed = "of an unknown version"
        extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
        found.append(Unmet(f"{wanted.name}{extras}{wanted.specifier}", wanted.name, installed, str(wanted.specifier)))
    return found


def remedy(missing: Iterable[Unmet]) -> str:
    return f"run `{shlex.quote(sys.executable)} -m pip install {' '.join(shlex.quote(item.requirement) for item in missing)}`"


def explanation() -> str:
    """One line on what is not as it must be and what to do; empty when all is, or that cannot be told."""
    try:
        missing = unmet()
    except Exception:  # noqa: BLE001 - it is asked because something is broken already, and that is what will be said then
        return ""
    return f"{'; '.join(map(str, missing))}: {remedy(missing)}" if missing else ""
