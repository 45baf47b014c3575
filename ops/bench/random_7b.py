"""A checkpoint of the reference shape of the GPU benchmarks: Llama-2-7B with random bf16 weights, as Hugging Face keeps it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from ops.bench.shape_checkpoint import LLAMA_7B


def write(directory: Path, device: torch.device) -> None:
    """13.5 GB in one file a layer."""
    LLAMA_7B.write_heads(directory)
    generator = torch.Generator(device).manual_seed(7)
    for name, shapes in LLAMA_7B.files.items():
        tensors = {key: _tensor(shape, generator) for key, shape in shapes.items()}
        save_file(tensors, directory / name, metadata={"format": "pt"})


def _tensor(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:  # a norm
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16).mul_(0.02).cpu()
