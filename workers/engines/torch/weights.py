"""Reading a checkpoint's tensors by their Hugging Face names: memory-mapped, only the slices a shard asks for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from gateway.api.errors import invalid
from workers.engines.torch.int4 import Int4Blocks

CODES, SCALES, MINIMA = ".int4.codes", ".int4.scales", ".int4.minima"
"""Suffixes under which converted checkpoints keep a 4-bit matrix, in place of `NAME`."""


@dataclass(frozen=True)
class Cut:
    """Part `index` of `count` equal parts along an axis: 0 output features, 1 input features."""

    axis: int
    index: int
    count: int

    def bounds(self, size: int) -> tuple[int, int]:
        return size // self.count * self.index, size // self.count * (self.index + 1)


class WeightSource(Protocol):
    read_bytes: int  # what was taken so far

    def has(self, name: str) -> bool: ...

    def dense(self, name: str, cut: Cut | None = None, transposed: bool = False) -> torch.Tensor:
        """In its stored dtype, [outputs, inputs] for matrices. `transposed`: the model's own layout is [inputs, outputs]."""
        ...

    def int4(self, name: str, cut: Cut | None = None) -> Int4Blocks | None:
        """None when the tensor is not stored in 4 bits, or the cut runs through a quantization group."""
        ...


class SafetensorsSource:
    """One or more .safetensors files. `rows_are_outputs`: matrices are stored [outputs, inputs] whatever the model's layout."""

    def __init__(self, files: tuple[Path, ...], base_prefix: str = "", rows_are_outputs: bool = False) -> None:
        self.read_bytes = 0
        self._rows_are_outputs = rows_are_outputs
        self._base_prefix = base_prefix + "."
        self._files = {}
        self._describe = ", ".join(str(file) for file in files)
        for file in files:
            try:
                handle = safe_open(str(file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise invalid(f"{file}: cannot be read ({error}); copy it again", field="source") from error
            for name in handle.keys():  # noqa: SIM118 - not a dict
                self._files[name] = handle

    def _stored_name(self, name: str) -> str | None:
        """Base models are saved without their prefix (`h.0…` for `transformer.h.0…`)."""
        short = name.removeprefix(self._base_prefix)
        return name if name in self._files else short if short in self._files else None

    def has(self, name: str) -> bool:
        return self._stored_name(name) is not None or self._stored_name(name + CODES) is not None

    def _tensor(self, name: str) -> torch.Tensor:
        stored = self._stored_name(name)
        if stored is None:
            raise invalid(f"{self._describe}: has no tensor {name}; the checkpoint is not complete", field="source")
        return self._files[stored].get_tensor(stored)

    def dense(self, name: str, cut: Cut | None = None, transposed: bool = False) -> torch.Tensor:
        blocks = self.int4(name, None) if self._stored_name(name) is None else None
        tensor = blocks.widen(torch.float32) if blocks else self._tensor(name)
        if transposed and not self._rows_are_outputs and tensor.dim() == 2:
            tensor = tensor.t()
        if cut is not None and cut.axis < tensor.dim():
            start, stop = cut.bounds(tensor.shape[cut.axis])
            tensor = tensor.narrow(cut.axis, start, stop - start)
        if not blocks:
            self.read_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def int4(self, name: str, cut: Cut | None = None) -> Int4Blocks | None:
        if self._stored_name(name + CODES) is None:
            return None
        blocks = Int4Blocks(*(self._tensor(name + suffix) for suffix in (CODES, SCALES, MINIMA)))
        if cut is not None:
            start, stop = cut.bounds(blocks.shape[cut.axis])
            try:
                blocks = blocks.columns(start, stop) if cut.axis else blocks.rows(start, stop)
            except ValueError:
                return None
        self.read_bytes += sum(part.numel() * part.element_size() for part in (blocks.codes, blocks.scales, blocks.minima))
        return blocks
