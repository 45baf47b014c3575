"""Where a checkpoint's weights are read from: its own files, or what a GGUF file was converted to."""

from __future__ import annotations

from pathlib import Path

from gateway.api.checkpoint import Checkpoint
from workers.engines.base import ProgressFn
from workers.engines.torch.weights import SafetensorsSource


def weight_source(checkpoint: Checkpoint, base_prefix: str, cache_dir: Path, progress: ProgressFn) -> SafetensorsSource:
    """`base_prefix`: what the model calls its base, without which base models are saved. Converting takes a while, once."""
    if checkpoint.format == "safetensors":
        files = tuple(file for file in checkpoint.files if file.suffix == ".safetensors")
        return SafetensorsSource(files, base_prefix)
    from workers.engines.torch.gguf_convert import converted  # imports the package gguf, which only this format needs

    shape = checkpoint.shape
    file = converted(checkpoint.files, checkpoint.digest, shape.heads, shape.kv_heads, cache_dir, progress)
    return SafetensorsSource((file,), base_prefix, rows_are_outputs=True)
