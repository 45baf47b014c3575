"""Replacing the leaves of a stage by this package's, with weights from the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from gateway.api.errors import invalid
from workers.comm.base import GroupComm
from workers.engines.torch import int4, norm
from workers.engines.torch.head import RoundedHead, ScreenedHead, rounding_errors
from workers.engines.torch.int4 import Int4Blocks
from workers.engines.torch.linear import (
    DenseLinear,
    GatheredLinear,
    Int4Linear,
    Int8Linear,
    ProjectionPart,
    RowParallel,
    SharedProjection,
)
from workers.engines.torch.memory import TensorRegion
from workers.engines.torch.parallel import ParallelPlan, Style
from workers.engines.torch.stage import StageModel
from workers.engines.torch.weights import Cut, WeightSource

# Projections of one input that are computed as one, in the order in which the models call them.
_FUSED_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_INT4_ROWS = 16  # the int4 operator takes output features in multiples of it


@dataclass(frozen=True)
class Precision:
    """How matrices are kept (`name`: fp32, bf16, int8, int4) and in what dtype activations flow."""

    name: str
    compute: torch.dtype


def precision_of(name: str) -> Precision:
    """fp16 becomes bf16: CPUs compute one of them fast. YardError for what this engine does not have."""
    if name == "fp32":
        return Precision("fp32", torch.float32)
    if name in ("bf16", "fp16"):
        return Precision("bf16", torch.bfloat16)
    if name == "int4":
        return Precision("int4" if int4.operator_works() else "bf16", torch.bfloat16)
    if name == "int8":
        return Precision("int8", torch.bfloat16)
    raise invalid(f"precision {name} is not one of the torch engine's on CPU: fp32, bf16, int8, int4", field="precision")


class StageFiller:
    def __init__(
        self,
        stage: StageModel,
        plan: ParallelPlan,
        source: WeightSource,
        precision: Precision,
        memory: TensorRegion,
        comm: GroupComm,
        progress: Callable[[float], None],
    ) -> None:
        self._stage = stage
        self._plan = plan
        self._source = source
        self._precision = precision
        self._memory = memory
        self._comm = comm
        self._progress = progress

    def fill(self) -> None:
        """Afterwards nothing of the stage is left on the meta device. MemoryError when the region's budget does not suffice."""
        model = self._stage.model
        root, *inner = model.named_modules()
        parents = [*inner, root]  # a tied head takes the embedding's memory
        for done, (name, module) in enumerate(parents, start=1):
            self._fill_module(name, module)
            self._progress(done / len(parents))
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                raise invalid(f"the torch engine does not know how to load {name} of {type(model).__name__}", field="engine")

    def _fill_module(self, name: str, parent: nn.Module) -> None:
        children = dict(parent.named_children())
        for group in _FUSED_TOGETHER:
            linears = [children.get(child) for child in group]
            if all(isinstance(linear, nn.Linear) for linear in linears):
                self._fuse(name, parent, group)
        for child, module in parent.named_children():
            full = f"{name}.{child}" if name else child
            if module is self._stage.model.get_output_embeddings() and isinstance(module, nn.Linear):
                setattr(parent, child, self._head(full, module))
            elif isinstance(module, (nn.Linear, Conv1D)):
                setattr(parent, child, self._linear(full, module))
            elif norm.is_rms_norm(module):
                weight = self._dense(f"{full}.weight")
                weight = (weight.float() + norm.weight_offset(module)).to(self._precision.compute).repeat(2)
                setattr(parent, child, norm.RmsNorm(self._memory.copy(weight), norm.epsilon(module)))
            elif isinstance(module, (nn.LayerNorm, nn.Embedding)):
                for key, _ in list(module.named_parameters(recurse=False)):
                    value = self._memory.copy(self._dense(f"{full}.{key}"))
                    setattr(module, key, nn.Parameter(value, requires_grad=False))

    def _fuse(self, name: str, parent: nn.Module, group: tuple[str, ...]) -> None:
        linears: list[Any] = [getattr(parent, child) for child in group]
        names = [f"{name}.{child}" for child in group]
        styles = {self._plan.style(full, linear.out_features) for full, linear in zip(names, linears, strict=True)}
        biases = {linear.bias is not None for linear in linears}
        style, has_bias = styles.pop(), biases.pop()
        if styles or biases or style not in (Style.WHOLE, Style.OUTPUTS):
            return
        cuts = [self._plan.cut(style, full) for full in names]
        sizes = [linear.out_features // (cut.count if cut else 1) for linear, cut in zip(linears, cuts, strict=True)]
        shared = SharedProjection(self._matrix(names, cuts, has_bias, transposed=False), sizes)
        for index, child in enumerate(group):
            setattr(parent, child, ProjectionPart(shared, index))

    def _head(self, name: str, module: nn.Linear) -> nn.Module:
        """Exact in fp32 where it matters, but for 4-bit heads over several ranks, of which nobody keeps more than 4 bits."""
        if self._screens_head(module):
            return self._screened_head(name)
        linear = self._linear(name, module)
        inner = linear.linear if isinstance(linear, GatheredLinear) else linear
        if not isinstance(inner, (DenseLinear, Int8Linear)) or self._precision.compute is torch.float32:
            return linear
        return GatheredLinear(RoundedHead(inner), self._comm) if isinstance(linear, GatheredLinear) else RoundedHead(inner)

    def _screens_head(self, module: nn.Module) -> bool:
        return (
            self._precision.name == "int4"
            and self._plan.count == 1
            and isinstance(module, nn.Linear)
            and module.bias is None
            and module.in_features % int4.GROUP == 0
            and module.out_features % _INT4_ROWS == 0
        )

    def _screened_head(self, name: str) -> ScreenedHead:
        """A tied head shares the embedding's memory, which is filled first."""
        stored = self._stored_name(f"{name}.weight")
        embedding = self._stage.model.get_input_embeddings()
        if stored != self._stage.checkpoint_name(f"{name}.weight") and self._stage.is_first:
            weight: torch.Tensor = embedding.weight.data  # pyright: ignore[reportAssignmentType]
        else:
            weight = self._memory.copy(self._dense(f"{name}.weight"))
        blocks = int4.quantize(weight)
        packed, scales_and_zeros = int4.pack(blocks)
        errors = self._memory.copy(rounding_errors(weight, blocks))
        return ScreenedHead(weight, self._memory.copy(packed), self._memory.copy(scales_and_zeros), errors)

    def _linear(self, name: str, module: nn.Linear | Conv1D) -> nn.Module:
        transposed = isinstance(module, Conv1D)
        outputs = module.nf if isinstance(module, Conv1D) else module.out_features
        style = self._plan.style(name, outputs)
        cut = self._plan.cut(style, name)
        has_bias = module.bias is not None
        if style is Style.INPUTS:
            bias = self._memory.copy(self._dense(f"{name}.bias")) if has_bias else None
            return RowParallel(self._matrix([name], [cut], False, transposed), bias, self._comm)
        linear = self._matrix([name], [cut], has_bias, transposed)
        return GatheredLinear(linear, self._comm) if style is Style.GATHERED else linear

    def _matrix(self, names: list[str], cuts: list[Cut | None], has_bias: bool, transposed: bool) -> nn.Module:
        """One matmul over the matrices of `names`, one below the other."""
        bias = None
        if has_bias:
            biases = [self._dense(f"{name}.bias", cut) for name, cut in zip(names, cuts, strict=True)]
            bias = self._memory.copy(torch.cat(biases))
        stored = [(self._stored_name(f"{name}.weight"), cut) for name, cut in zip(names, cuts, strict=True)]
        if self._precision.name == "int4":
            blocks = [self._int4(name, cut, transposed) for name, cut in stored]
            if all(blocks):
                weights = int4.pack(int4.concatenate([part for part in blocks if part is not None]))
                return Int4Linear(self._memory.copy(weights[0]), self._memory.copy(weights[1]), bias)
        tensors = [self._source.dense(name, cut, transposed) for name, cut in stored]
        if self._precision.name == "int8":
            return self._int8(torch.cat([tensor.float() for tensor in tensors]), bias)
        rows, columns = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        weight = self._memory.empty(self._precision.compute, (rows, columns))
        torch.cat([tensor.to(weight.dtype) for tensor in tensors], out=weight)
        return DenseLinear(weight, bias)

    def _int8(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Int8Linear:
        scales = weight.abs().amax(dim=1).clamp_(min=1e-8) / 127
        codes = (weight / scales.unsqueeze(1)).round_().to(torch.int8)
        return Int8Linear(self._memory.copy(codes), self._memory.copy(scales.to(torch.bfloat16)), bias)

    def _int4(self, name: str, cut: Cut | None, transposed: bool) -> Int4Blocks | None:
        """As stored, or rounded to 4 bits now; None where the shape does not allow it."""
        blocks = self._source.int4(name, cut)
        if blocks is None:
            weight = self._source.dense(name, cut, transposed)
            if weight.shape[1] % int4.GROUP:
                return None
            blocks = int4.quantize(weight)
        return blocks if blocks.shape[0] % _INT4_ROWS == 0 else None

    def _dense(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        return self._source.dense(self._stored_name(name), cut).to(self._precision.compute)

    def _stored_name(self, name: str) -> str:
        """A tied head is stored as the embedding."""
        full = self._stage.checkpoint_name(name)
        if full == "lm_head.weight" and not self._source.has(full):
            return f"{self._stage.base_prefix}.{self._stage.names.embedding}.weight"
        return full
