"""Matrix products of a stage on a GPU, by how many rows they have and how the weights are kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from workers.engines.torch.cuda import ops
from workers.engines.torch.cuda.ops import Weight

# Up to so many rows our own kernel reads weights faster than cuBLAS (H200, 7B shapes: 5-8 %), beyond it slower.
NARROW_ROWS = 32


class GpuLinear(nn.Module):
    """[n, k] in the activations' dtype, or in 8 bits (int8, fp8) with a scale a row."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        weight = self.weight
        if rows <= NARROW_ROWS and x.dtype != torch.float32 and ops.fused(x):
            return ops.narrow_linear(x.reshape(rows, -1), weight).view(*x.shape[:-1], -1)
        if weight.scales is None:
            return F.linear(x, weight.matrix, weight.bias)
        # Many rows: widening the weights once costs less than what a kernel of our own loses against cuBLAS.
        return F.linear(x, weight.widened(x.dtype), weight.bias)


class GpuRmsNorm(nn.Module):
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x.contiguous(), self.weight, self.eps)
