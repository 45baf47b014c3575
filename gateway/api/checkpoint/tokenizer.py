"""The tokenizer of a checkpoint as a directory that `tokenizers` and jinja can read at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

from filelock import FileLock, Timeout

from gateway.api.checkpoint.checkpoint import Checkpoint
from gateway.api.checkpoint.gguf_header import read_gguf_header
from gateway.api.checkpoint.gguf_tokenizer import write_gguf_tokenizer
from gateway.api.errors import YardError, invalid, unavailable

_CONVERT_TIMEOUT_S = 300.0


def tokenizer_dir(checkpoint: Checkpoint, cache_dir: Path) -> Path:
    """A directory with tokenizer.json, tokenizer_config.json and, if the model has one, chat_template.jinja.

    A tokenizer.json in the checkpoint's directory is used as it is. Everything else is converted once and kept under the
    checkpoint's digest; processes that ask at once wait for one.
    """
    directory = checkpoint.path if checkpoint.format == "safetensors" else checkpoint.path.parent
    if (directory / "tokenizer.json").is_file():
        return directory
    target = cache_dir / "tokenizers" / checkpoint.digest
    if (target / "tokenizer.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{target}.lock", timeout=_CONVERT_TIMEOUT_S):
            if not (target / "tokenizer.json").is_file():
                _convert(checkpoint, target)
    except Timeout as error:
        raise unavailable(f"{checkpoint.path}: another process converts its tokenizer since {_CONVERT_TIMEOUT_S} s") from error
    return target


def _convert(checkpoint: Checkpoint, target: Path) -> None:
    """Into a directory beside the target, renamed when it is complete."""
    work = Path(mkdtemp(dir=target.parent, prefix=".new-"))
    try:
        if checkpoint.format == "safetensors" or not write_gguf_tokenizer(read_gguf_header(checkpoint.path), work):
            _convert_in_child(checkpoint, work)
        os.replace(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert_in_child(checkpoint: Checkpoint, work: Path) -> None:
    """By transformers, whose import takes seconds and memory that this process need not keep."""
    command = [sys.executable, "-m", "gateway.api.checkpoint.convert_tokenizer", str(checkpoint.path), str(work)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_CONVERT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise _failed(checkpoint, f"it took longer than {_CONVERT_TIMEOUT_S} s") from error
    if done.returncode != 0 or not (work / "tokenizer.json").is_file():
        raise _failed(checkpoint, (done.stderr.strip().splitlines() or ["no message"])[-1])


def _failed(checkpoint: Checkpoint, problem: str) -> YardError:
    fix = "put a tokenizer.json beside its weights"
    return invalid(f"{checkpoint.path}: its tokenizer cannot be converted ({problem}); {fix}", field="source")
