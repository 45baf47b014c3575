"""What stands in for the `nn.Linear` of a transformers model: fp32, bf16, int8 or int4 weights, fused or split over ranks.

Modules define `__call__` themselves: `nn.Module.__call__` looks for hooks that never exist here, and a decode step calls
some hundred of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from workers.comm.base import GroupComm
from workers.engines.torch import int4


class DenseLinear(nn.Module):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = weight  # [n, k]
        self.bias = bias
        self.outputs, self.inputs = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Int4Linear(nn.Module):
    def __init__(self, packed: torch.Tensor, scales_and_zeros: torch.Tensor, bias: torch.Tensor | None) -> None:
        """As `int4.pack` made them: scales and zeros are [k / 32, n, 2]."""
        super().__init__()
        self.packed = packed
        self.scales_and_zeros = scales_and_zeros
        self.bias = bias
        self.outputs, self.inputs = scales_and_zeros.shape[1], scales_and_zeros.shape[0] * int4.GROUP

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = int4.matmul(x.reshape(-1, x.shape[-1]), self.packed, int4.GROUP, self.scales_and_zeros).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class Int8Linear(nn.Module):
    """One scale per output channel, activations stay bf16."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.codes = codes  # [n, k] int8
        self.scales = scales  # [n] bf16
        self.bias = bias
        self.outputs, self.inputs = codes.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.aten._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), self.codes, self.scales).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class RowParallel(nn.Module):
    """Each shard holds a slice of the input features; the partial products are summed, then the bias is added once."""

    def __init__(self, linear: nn.Module, bias: torch.Tensor | None, comm: GroupComm) -> None:
        super().__init__()
        self.linear = linear
        self.bias = bias
        self._comm = comm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._comm.all_reduce(self.linear(x))
        return y if self.bias is None else y + self.bias


class GatheredLinear(nn.Module):
    """Each shard computes a slice of the outputs; all get the whole."""

    def __init__(self, linear: nn.Module, comm: GroupComm) -> None:
        super().__init__()
        self.linear = linear
        self._comm = comm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._comm.all_gather(self.linear(x))


class SharedProjection(nn.Module):
    """Several projections of one input as one matmul. The model still calls its parts one by one, always in the same order:
    the first call computes all, the others take their part.
    """

    def __init__(self, linear: nn.Module, sizes: list[int]) -> None:
        super().__init__()
        self.linear = linear
        self.sizes = sizes
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if index == 0:
            self._input = x
            self._parts = self.linear(x).split(self.sizes, dim=-1)
        elif x is not self._input:
            raise RuntimeError("fused projections were called with different inputs")
        return self._parts[index]


class ProjectionPart(nn.Module):
    def __init__(self, shared: SharedProjection, index: int) -> None:
        super().__init__()
        self.shared = shared
        self._index = index

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared.part(self._index, x)
