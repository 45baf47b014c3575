"""Matrix products of a stage on a GPU, by how many rows they have and how the weights are kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from workers.engines.torch.cuda import ops
from workers.engines.torch.cuda.ops import Weight

# Up to so many rows, products with few outputs are split over their inputs, so that more programs read weights at once.
PARTS_ROWS = 64
WIDE_OUTPUTS = 8192  # enough programs without that
# Up to so many rows our own kernel computes the others; from there on cuBLAS is as fast (H200, 7B shapes).
NARROW_ROWS = 8
NARROW_ROWS_8_BIT = 64


class GpuLinear(nn.Module):
    """[n, k] in the activations' dtype, or in 8 bits (int8, fp8) with a scale a row."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        weight = self.weight
        if rows == 1 and weight.outputs < WIDE_OUTPUTS and _has_kernel(x):
            return ops.vector_linear(x.reshape(1, -1), weight).view(*x.shape[:-1], -1)
        most = NARROW_ROWS if weight.scales is None else NARROW_ROWS_8_BIT
        if rows <= most and _has_kernel(x):
            return ops.narrow_linear(x.reshape(rows, -1), weight).view(*x.shape[:-1], -1)
        if weight.scales is None:
            return F.linear(x, weight.matrix, weight.bias)
        # Many rows: widening the weights once costs less than what a kernel of our own loses against cuBLAS.
        return F.linear(x, weight.widened(x.dtype), weight.bias)

    def gives_parts(self, x: torch.Tensor) -> bool:
        weight = self.weight
        return 1 < x.shape[0] <= PARTS_ROWS and weight.bias is None and weight.outputs < WIDE_OUTPUTS and _has_kernel(x)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, k] → [parts, rows, n] in fp32, to be summed."""
        return ops.narrow_parts(x, self.weight)


def _has_kernel(x: torch.Tensor) -> bool:
    return x.dtype != torch.float32 and ops.fused(x)


class GpuRmsNorm(nn.Module):
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x.contiguous(), self.weight, self.eps)
