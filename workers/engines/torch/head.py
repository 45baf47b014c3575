"""The language head of a 4-bit model: exact where it matters, 4-bit where that can be made up for.

Rounding the head to 4 bits costs accuracy (SmolLM2: 17 % of the most likely tokens change), keeping it in bf16 costs speed
(a third of a decode step). Greedy decoding needs only the largest logit: so 4-bit logits choose the candidates, and the
candidates' logits are computed in full. Everything else (sampling, log-probabilities) uses the bf16 head.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from workers.engines.torch import int4
from workers.engines.torch.int4 import Int4Blocks

# A logit's rounding error is about normal, with less than the deviation that `rounding_errors` gives (0.65 of it in SmolLM2):
# beyond 4 of those lies one in 10^9.
_DEVIATIONS = 4.0
_CHUNK = 8192


class ScreenedHead(nn.Module):
    def __init__(self, weight: torch.Tensor, packed: torch.Tensor, scales_and_zeros: torch.Tensor, errors: torch.Tensor) -> None:
        """`weight` [vocabulary, hidden] bf16; `errors` [vocabulary] fp32: see `rounding_errors`."""
        super().__init__()
        self.weight = weight
        self.packed = packed
        self.scales_and_zeros = scales_and_zeros
        self.errors = errors

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → logits [n, vocabulary]."""
        return F.linear(hidden, self.weight)

    def argmax(self, hidden: torch.Tensor) -> list[int]:
        """The token with the largest logit of every row."""
        screened = int4.matmul(hidden, self.packed, int4.GROUP, self.scales_and_zeros).float().numpy()
        exact = hidden.float()
        scales = (_DEVIATIONS * exact.norm(dim=-1)).tolist()
        errors = self.errors.numpy()
        tokens = []
        for row, scale in enumerate(scales):
            margins = errors * np.float32(scale)
            best = int(screened[row].argmax())
            limit = screened[row, best] - margins[best]
            if not np.isfinite(limit):
                raise FloatingPointError("the logits are not finite: the checkpoint's weights are damaged, or overflow in bf16")
            candidates = torch.from_numpy(np.flatnonzero(np.add(screened[row], margins, out=margins) >= limit))
            logits = self.weight.index_select(0, candidates).float() @ exact[row]
            tokens.append(int(candidates[int(logits.argmax())]))
        return tokens


def rounding_errors(weight: torch.Tensor, blocks: Int4Blocks) -> torch.Tensor:
    """By token, the deviation of its logit for a hidden state of norm 1 and random direction: |row error| / √hidden."""
    errors = torch.empty(weight.shape[0])
    for start in range(0, weight.shape[0], _CHUNK):
        part = slice(start, start + _CHUNK)
        difference = weight[part].float() - blocks.rows(start, start + _CHUNK).widen(torch.float32)
        errors[part] = difference.norm(dim=-1)
    return errors / math.sqrt(weight.shape[1])
