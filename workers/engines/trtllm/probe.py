"""`boot.py probe`: print as JSON what the installed TensorRT-LLM has (`gateway.api.trtllm.features.Features`).

Imports it, which takes about a minute and needs the GPU's driver library, so run it where the model is to run.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import platform
import sys
import typing
from pathlib import Path
from typing import Any

_COMMANDS = ("trtllm-build", "trtllm-llmapi-launch", "trtllm-serve")


def main(arguments: list[str]) -> int:
    """With a file name, the answer goes there: the library prints to standard output while it is imported."""
    answer = json.dumps(features())
    if arguments:
        Path(arguments[0]).write_text(answer)
    else:
        print(answer)
    return 0


def features() -> dict[str, Any]:
    library = importlib.import_module("tensorrt_llm")
    fields = argument_fields()
    return {
        "version": str(library.__version__),
        "python": platform.python_version(),
        "arguments": sorted(fields),
        "configs": {name: sorted(kind.model_fields) for name in fields if (kind := config_class(name))},
        "llm": _methods(library.LLM),
        "async_llm": _methods(async_llm()),
        "generate": list(inspect.signature(library.LLM.generate_async).parameters),
        "sampling": sampling_fields(),
        "mpi_session": _mpi_session(),
        "ray": _version("ray"),
        "cuda": _cuda(),
        "compute_capability": _compute_capability(),
        "modelopt": _version("nvidia-modelopt"),
        "commands": [name for name in _COMMANDS if (Path(sys.executable).parent / name).exists()],
    }


def argument_fields() -> dict[str, Any]:
    """Of TorchLlmArgs, by name: the constructor takes these."""
    return dict(importlib.import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs.model_fields)


def config_class(argument: str) -> Any:
    """The configuration class that an argument takes, or None."""
    field = argument_fields().get(argument)
    return _model_class(field.annotation) if field is not None else None


def sampling_fields() -> list[str]:
    return [
        name for name in inspect.signature(importlib.import_module("tensorrt_llm").SamplingParams).parameters if name != "kwargs"
    ]


def async_llm() -> Any:
    """The class, or None where the version has none."""
    library = importlib.import_module("tensorrt_llm")
    if hasattr(library, "AsyncLLM"):
        return library.AsyncLLM
    try:
        return importlib.import_module("tensorrt_llm._torch.async_llm").AsyncLLM
    except (ImportError, AttributeError):
        return None


def _model_class(annotation: Any) -> Any:
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return annotation
    kinds = [kind for part in typing.get_args(annotation) if (kind := _model_class(part))]
    return kinds[0] if len(kinds) == 1 else None  # of a union of several, none is meant


def _methods(kind: Any) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))] if kind else []


def _mpi_session() -> list[str]:
    try:
        session = importlib.import_module("tensorrt_llm.llmapi.mpi_session").MpiPoolSession
    except (ImportError, AttributeError):
        return []
    return list(inspect.signature(session.__init__).parameters)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cuda() -> str:
    try:
        return str(importlib.import_module("torch").version.cuda or "")
    except (ImportError, AttributeError):
        return ""


def _compute_capability() -> str:
    from workers.engines.trtllm.gpu_memory import Nvml

    try:
        return Nvml().compute_capability(0)
    except (ImportError, OSError, RuntimeError):
        return ""
