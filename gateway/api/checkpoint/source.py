"""From what a model's `source` says to a file or directory on this machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from gateway.api.errors import YardError, invalid


def resolve(source: str) -> Path:
    """`package:NAME[/FILE]`, `file:PATH` or a plain path, as an absolute path to a .gguf file or a Hugging Face directory.

    A package is found, not imported. YardError(INVALID) names the source and the fix.
    """
    kind, separator, rest = source.partition(":")
    if separator and kind == "package":
        return _checkpoint_at(_in_package(source, rest), source)
    path = Path(rest if separator and kind == "file" else source).expanduser()
    if not path.exists():
        raise _invalid(source, f"there is no {path.absolute()} on this machine; copy the checkpoint there or correct the path")
    return _checkpoint_at(path.absolute(), source)


def _in_package(source: str, rest: str) -> Path:
    name, _, inner = rest.partition("/")
    module = name.replace("-", "_")
    if not module.isidentifier():
        raise _invalid(source, f"{name!r} is not the name of a Python package; write package:NAME or package:NAME/FILE")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise _invalid(source, f"the Python package {name} is not installed here; run `pip install {name.replace('_', '-')}`")
    path = Path(next(iter(spec.submodule_search_locations))) / inner
    if not path.exists():
        found = ", ".join(sorted(entry.name for entry in path.parent.iterdir() if entry.suffix == ".gguf")) if inner else ""
        raise _invalid(source, f"the package has no file {inner}; it has {found or 'no .gguf file beside it'}")
    return path


def _checkpoint_at(path: Path, source: str) -> Path:
    """The checkpoint itself: `path`, or the one checkpoint inside the directory `path`."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise _invalid(source, f"{path.name} is no .gguf file; name a .gguf file, or the directory that holds config.json")
        return path
    if (path / "config.json").is_file():
        return path
    # Only the first part of a split GGUF names the whole.
    candidates = sorted(file for file in path.glob("*.gguf") if "-of-" not in file.stem or "-00001-of-" in file.stem)
    if not candidates:
        candidates = sorted(file.parent for file in path.glob("*/config.json"))
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        names = ", ".join(candidate.name for candidate in candidates)
        raise _invalid(source, f"{path} holds {len(candidates)} checkpoints ({names}); add /NAME to choose one")
    raise _invalid(source, f"{path} holds neither a .gguf file nor a config.json; name the directory of a checkpoint")


def _invalid(source: str, problem: str) -> YardError:
    return invalid(f"source `{source}`: {problem}", field="source")
