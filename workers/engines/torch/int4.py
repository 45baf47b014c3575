"""4-bit weights: groups of 32 along the input, value = code * scale + minimum, codes 0..15 (what GGUF's Q4_1 and Q4_0 hold).

They stay 4-bit for torch's CPU matmul, an operator private to torch: `operator_works` compares it with plain arithmetic
once per process, and where it is missing or wrong the weights are widened to bf16 instead.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

GROUP = 32
_ZERO_CODE = 8  # the operator computes (code - 8) * scale + zero
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Int4Blocks:
    """codes [n, k/2] uint8, element 2i in the low half of byte i; scales and minima [n, k/32] in any float dtype."""

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2

    def rows(self, start: int, stop: int) -> Int4Blocks:
        return Int4Blocks(self.codes[start:stop], self.scales[start:stop], self.minima[start:stop])

    def columns(self, start: int, stop: int) -> Int4Blocks:
        """Both ends on a group boundary, else ValueError."""
        if start % GROUP or stop % GROUP:
            raise ValueError(f"columns {start}..{stop} cut a group of {GROUP}")
        groups = slice(start // GROUP, stop // GROUP)
        return Int4Blocks(self.codes[:, start // 2 : stop // 2], self.scales[:, groups], self.minima[:, groups])

    def widen(self, dtype: torch.dtype) -> torch.Tensor:
        """[n, k] as numbers."""
        n, k = self.shape
        codes = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).view(n, k // GROUP, GROUP).float()
        values = codes * self.scales.float().unsqueeze(-1) + self.minima.float().unsqueeze(-1)
        return values.view(n, k).to(dtype)


def concatenate(blocks: list[Int4Blocks]) -> Int4Blocks:
    """One below the other."""
    if len(blocks) == 1:
        return blocks[0]
    return Int4Blocks(
        torch.cat([block.codes for block in blocks]),
        torch.cat([block.scales for block in blocks]),
        torch.cat([block.minima for block in blocks]),
    )


def quantize(weight: torch.Tensor) -> Int4Blocks:
    """Round to nearest between each group's minimum and maximum. [n, k] with k a multiple of 32."""
    n, k = weight.shape
    groups = weight.float().view(n, k // GROUP, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).clamp_(min=torch.finfo(torch.bfloat16).tiny)
    codes = ((groups - low.unsqueeze(-1)) / scales.unsqueeze(-1)).round_().clamp_(0, 15).to(torch.uint8).view(n, k // 2, 2)
    return Int4Blocks(codes[..., 0] | (codes[..., 1] << 4), scales, low)


def pack(blocks: Int4Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, scales and zeros) as `matmul` takes them; their layout is the operator's own and depends on the CPU."""
    n, k = blocks.shape
    codes = torch.stack((blocks.codes & 15, blocks.codes >> 4), dim=-1).view(n, k).to(torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = blocks.scales.float()
    zeros = blocks.minima.float() + _ZERO_CODE * scales
    return packed, torch.stack((scales, zeros), dim=-1).transpose(0, 1).contiguous().to(torch.bfloat16)


def _missing(*_: object) -> torch.Tensor:
    raise NotImplementedError("torch._weight_int4pack_mm_for_cpu")


matmul: Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], torch.Tensor] = getattr(
    torch, "_weight_int4pack_mm_for_cpu", _missing
)
"""(x [m, k] bf16, packed weights, group, scales and zeros) → [m, n] bf16"""


@functools.cache
def operator_works() -> bool:
    """Whether this torch on this CPU computes 4-bit matmuls right, for one row and for many."""
    generator = torch.Generator().manual_seed(0)
    blocks = quantize(torch.randn(96, 128, generator=generator))
    x = torch.randn(19, 128, generator=generator).to(torch.bfloat16)
    wanted = x.float() @ blocks.widen(torch.float32).T
    try:
        weights = pack(blocks)
        errors = [
            float((matmul(part, weights[0], GROUP, weights[1]).float() - want).abs().max())
            for part, want in ((x, wanted), (x[:1], wanted[:1]))
        ]
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        _log.warning("torch %s has no CPU int4 matmul here (%s); 4-bit weights are widened to bf16", torch.__version__, error)
        return False
    tolerance = 0.03 * float(wanted.abs().max())  # bf16 keeps 8 bits
    if max(errors) > tolerance:
        _log.warning(
            "torch %s computes int4 matmuls wrong by %.3g; 4-bit weights are widened to bf16", torch.__version__, max(errors)
        )
        return False
    return True
