"""Language heads whose logits are exact in fp32 where it matters.

A fast product gives every logit with a rounding error: of the 4-bit copy of a head, or of bf16 results, in which neighbouring
logits often become equal. What may be the largest within that error is computed again in fp32, row by row, so it depends
neither on the batch nor on what else a request asks. A 4-bit head alone would change 17 % of SmolLM2's most likely tokens, one
in bf16 costs a third of a decode step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from workers.engines.base import DamagedModelError
from workers.engines.torch import int4
from workers.engines.torch.int4 import Int4Blocks
from workers.engines.torch.linear import DenseLinear, Int8Linear

# A logit's rounding error is about normal, with less than the deviation that `rounding_errors` gives (0.65 of it in SmolLM2):
# beyond 4 of those lies one in 10^9.
_DEVIATIONS = 4.0
_CHUNK = 8192
_BF16_ERROR = 2.0**-8  # of a rounded number, relative; twice the bound, for what was rounded on the way
# `logits` are exact for tokens that are at least e^-10 as likely as the best, and for no more than so many.
_SPAN = 10.0
_MOST_EXACT = 1024


def not_finite() -> DamagedModelError:
    return DamagedModelError(
        "its logits are not finite: the weights gave NaN or infinity; they are damaged, or overflow in this precision"
    )


class RescoredHead(nn.Module):
    """[n, hidden] → logits [n, vocabulary]."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32. Tokens much less likely than the best keep the error of the fast product. Rows of a damaged model are left as
        they are: the ranks of a group meet once more before anybody may raise.
        """
        logits = self._fast(hidden)
        exact = hidden.float()
        for row, values in enumerate(logits.numpy()):
            margins = self._margins(values, exact[row])
            best = _candidates(values, margins)
            if not len(best):
                continue
            near = _near(values, margins)
            found = self._exact(best, exact[row])
            values[near] = self._exact(near, exact[row])
            values[best] = found  # computed just as `argmax` does
        return logits

    def argmax(self, hidden: torch.Tensor, noise: Sequence[torch.Tensor | None] = ()) -> list[int]:
        """The token with the largest exact logit of every row, after the row's noise [vocabulary] was added if there is one.

        DamagedModelError where logits are no numbers.
        """
        rows = self._fast(hidden).numpy()
        exact = hidden.float()
        tokens = []
        for row, values in enumerate(rows):
            margins = self._margins(values, exact[row])
            added = noise[row] if noise else None
            if added is not None:
                values += added.numpy()
            candidates = _candidates(values, margins)
            if not len(candidates):
                raise not_finite()
            logits = self._exact(candidates, exact[row])
            if added is not None:
                logits += added.numpy()[candidates]
            tokens.append(int(candidates[int(logits.argmax())]))
        return tokens

    def _fast(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocabulary] fp32, of its own memory."""
        raise NotImplementedError

    def _margins(self, values: np.ndarray, hidden: torch.Tensor) -> np.ndarray:
        """[vocabulary]: by how much a fast logit may be wrong."""
        raise NotImplementedError

    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Their weights in fp32."""
        raise NotImplementedError

    def _exact(self, tokens: np.ndarray, hidden: torch.Tensor) -> np.ndarray:
        return (self._rows(torch.from_numpy(tokens)) @ hidden).numpy()


def _candidates(values: np.ndarray, margins: np.ndarray) -> np.ndarray:
    """Tokens that may have the largest logit; none where that is no number."""
    best = int(values.argmax())
    limit = values[best] - margins[best]
    return np.flatnonzero(values + margins >= limit) if np.isfinite(limit) else np.empty(0, np.int64)


def _near(values: np.ndarray, margins: np.ndarray) -> np.ndarray:
    """Tokens within `_SPAN` of the largest; of more than `_MOST_EXACT` the most likely ones."""
    best = int(values.argmax())
    near = np.flatnonzero(values >= values[best] - margins[best] - _SPAN)
    if len(near) > _MOST_EXACT:
        near = near[np.argpartition(values[near], -_MOST_EXACT)[-_MOST_EXACT:]]
    return near


class ScreenedHead(RescoredHead):
    """Weights in bf16, and a 4-bit copy for the fast product."""

    def __init__(self, weight: torch.Tensor, packed: torch.Tensor, scales_and_zeros: torch.Tensor, errors: torch.Tensor) -> None:
        """`weight` [vocabulary, hidden] bf16; `errors` [vocabulary] fp32: see `rounding_errors`."""
        super().__init__()
        self.weight = weight
        self.packed = packed
        self.scales_and_zeros = scales_and_zeros
        self.errors = errors

    def _fast(self, hidden: torch.Tensor) -> torch.Tensor:
        return int4.matmul(hidden, self.packed, int4.GROUP, self.scales_and_zeros).float()

    def _margins(self, values: np.ndarray, hidden: torch.Tensor) -> np.ndarray:
        del values
        return self.errors.numpy() * np.float32(_DEVIATIONS * float(hidden.norm()))

    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, tokens).float()


class RoundedHead(RescoredHead):
    """Weights in bf16 or int8, whose product comes rounded to bf16."""

    def __init__(self, linear: DenseLinear | Int8Linear) -> None:
        super().__init__()
        self.linear = linear

    def _fast(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden).float()

    def _margins(self, values: np.ndarray, hidden: torch.Tensor) -> np.ndarray:
        return np.abs(values) * np.float32(_BF16_ERROR)

    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        linear = self.linear
        if isinstance(linear, Int8Linear):
            return linear.codes.index_select(0, tokens).float() * linear.scales.index_select(0, tokens).float().unsqueeze(1)
        return linear.weight.index_select(0, tokens).float()

    def _exact(self, tokens: np.ndarray, hidden: torch.Tensor) -> np.ndarray:
        logits = super()._exact(tokens, hidden)
        return logits if self.linear.bias is None else logits + self.linear.bias.float().numpy()[tokens]


def rounding_errors(weight: torch.Tensor, blocks: Int4Blocks) -> torch.Tensor:
    """By token, the deviation of its logit for a hidden state of norm 1 and random direction: |row error| / √hidden."""
    errors = torch.empty(weight.shape[0])
    for start in range(0, weight.shape[0], _CHUNK):
        part = slice(start, start + _CHUNK)
        difference = weight[part].float() - blocks.rows(start, start + _CHUNK).widen(torch.float32)
        errors[part] = difference.norm(dim=-1)
    return errors / math.sqrt(weight.shape[1])
