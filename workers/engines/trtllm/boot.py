"""Started as a file by the interpreter that has TensorRT-LLM: `python boot.py probe|serve|memory …`.

Makes this directory importable under its own name and nothing else of ours, so that the packages of the site's environment
never get into the engine's.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

PACKAGE = "workers.engines.trtllm"


def make_importable() -> None:
    directory = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != directory]
    parts = PACKAGE.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        module = types.ModuleType(name)
        module.__path__ = [directory] if depth == len(parts) else []
        sys.modules[name] = module


# The library's spawned MPI ranks import this file too, under another name: they must only find what it defines.
if __name__ == "__main__":
    make_importable()
    command, *rest = sys.argv[1:]
    sys.exit(importlib.import_module(f"{PACKAGE}.{command}").main(rest))
