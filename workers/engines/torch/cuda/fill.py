"""Filling a stage with weights on a GPU, in the order in which a step uses them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from gateway.api.errors import invalid
from workers.engines.torch import norm
from workers.engines.torch.cuda.linear import GpuLinear, GpuRmsNorm
from workers.engines.torch.cuda.ops import Weight
from workers.engines.torch.fill import Precision, StageFiller
from workers.engines.torch.memory import TensorRegion
from workers.engines.torch.weights import Cut

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class _Codes:
    dtype: torch.dtype
    largest: float


_EIGHT_BITS = {"int8": _Codes(torch.int8, 127.0), "fp8": _Codes(FP8, 448.0)}


def gpu_precision(name: str, stored: str) -> Precision:
    """YardError for what this engine does not have. 4-bit checkpoints are widened: there is no 4-bit kernel here."""
    if name == "int4":
        return Precision("bf16", torch.bfloat16)
    if name in ("bf16", "fp32", "fp16"):
        return Precision(name, {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name])
    if name in _EIGHT_BITS:
        return Precision(name, torch.float16 if stored == "fp16" else torch.bfloat16)
    raise invalid(f"precision {name} is not one of the torch engine's on cuda: fp32, bf16, fp16, int8, fp8", field="precision")


class GpuFiller(StageFiller):
    """Embedding, layers, head: one after the other in one region. `layer_ends[i]`: bytes that layer i of the stage needs."""

    def __init__(self, *arguments: object, memory: TensorRegion, **rest: object) -> None:
        super().__init__(*arguments, memory=memory, **rest)  # pyright: ignore[reportArgumentType]
        self.layer_ends = [0] * self._stage.layers

    def _fill_module(self, name: str, parent: nn.Module) -> None:
        epsilons = {child: norm.epsilon(module) for child, module in parent.named_children() if norm.is_rms_norm(module)}
        super()._fill_module(name, parent)
        for child, epsilon in epsilons.items():
            twice: torch.Tensor = getattr(parent, child).weight
            setattr(parent, child, GpuRmsNorm(twice[: twice.shape[0] // 2], epsilon))
        prefix = f"{self._stage.base_prefix}.{self._stage.names.layers}."
        if name.startswith(prefix):
            self.layer_ends[int(name.removeprefix(prefix).partition(".")[0])] = self._memory.used_bytes

    def _matrix(self, names: list[str], cuts: list[Cut | None], has_bias: bool, transposed: bool) -> nn.Module:
        bias = None
        if has_bias:
            biases = [self._dense(f"{name}.bias", cut) for name, cut in zip(names, cuts, strict=True)]
            bias = self._memory.copy(torch.cat(biases))
        codes = _EIGHT_BITS.get(self._precision.name)
        stored = [self._stored_name(f"{name}.weight") for name in names]
        tied = stored != [self._stage.checkpoint_name(f"{name}.weight") for name in names]
        if tied and codes is None and cuts == [None] and self._stage.is_first:
            embedding: torch.Tensor = self._stage.model.get_input_embeddings().weight.data  # pyright: ignore[reportAssignmentType]
            return GpuLinear(Weight(embedding, None, bias))
        tensors = [self._source.dense(name, cut, transposed) for name, cut in zip(stored, cuts, strict=True)]
        rows, columns = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        weight = self._memory.empty(self._precision.compute if codes is None else codes.dtype, (rows, columns))
        scales = None if codes is None else self._memory.empty(torch.float32, (rows,))
        start = 0
        for tensor in tensors:
            part = slice(start, start + tensor.shape[0])
            if codes is None or scales is None:
                weight[part].copy_(tensor)
            else:
                wide = tensor.to(weight.device).float()
                scales[part] = wide.abs().amax(dim=1).clamp_(min=1e-8) / codes.largest
                wide /= scales[part].unsqueeze(1)
                weight[part].copy_(wide if codes.dtype == FP8 else wide.round_())
            start += tensor.shape[0]
        return GpuLinear(Weight(weight, scales, bias))
