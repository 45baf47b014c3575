"""The randomness of sampling: Gumbel noise that is a function of (seed, position, token) and of nothing else.

The token with the largest logit / temperature + noise is drawn with the softmax's probability (the Gumbel-max rule). So a draw
depends on no other sequence, no chunk, no rank and no preemption, and small errors of logits change it only between near-ties.
CPU and CUDA compute the same integers; their logarithms may differ in the last bit.
"""

from __future__ import annotations

import numpy as np
import torch

_UINT64 = 0xFFFFFFFFFFFFFFFF
_UINT32 = 0xFFFFFFFF
SPREAD = 0x9E3779B1  # 2^32 / golden ratio: neighbouring tokens far apart
# Two rounds of xor-shift and multiply: the finalizer of MurmurHash3, then that of Prospector (lowest bias known).
ROUNDS = ((16, 0x85EBCA6B, 13, 0xC2B2AE35, 16), (16, 0x7FEB352D, 15, 0x846CA68B, 16))
ONE_BELOW = 1.0 - 2.0**-24  # the largest fp32 below 1


def keys(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit numbers: the splitmix64 output function (https://prng.di.unimi.it/splitmix64.c) over seed and position."""
    value = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1342543DE82EF95) & _UINT64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _UINT64
    value ^= value >> 31
    return value & _UINT32, value >> 32


def gumbel(seed: int, position: int, tokens: np.ndarray) -> torch.Tensor:
    """fp32, one a token (uint32 ids)."""
    low, high = keys(seed, position)
    x = tokens * np.uint32(SPREAD)
    x += np.uint32(low)
    for number, (a, first, b, second, c) in enumerate(ROUNDS):
        if number:
            x ^= np.uint32(high)
        x ^= x >> np.uint32(a)
        x *= np.uint32(first)
        x ^= x >> np.uint32(b)
        x *= np.uint32(second)
        x ^= x >> np.uint32(c)
    return _of_uniform(torch.from_numpy(x.astype(np.float32)))


def gumbel_rows(low: torch.Tensor, high: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """[n, vocabulary] fp32 on the device of the keys, [n] int64 each."""
    x = torch.arange(vocabulary, device=low.device) * SPREAD + low.unsqueeze(1) & _UINT32
    for number, (a, first, b, second, c) in enumerate(ROUNDS):
        if number:
            x = x ^ high.unsqueeze(1)
        x = (x ^ x >> a) * first & _UINT32
        x = (x ^ x >> b) * second & _UINT32
        x = x ^ x >> c
    return _of_uniform(x.float())


def _of_uniform(x: torch.Tensor) -> torch.Tensor:
    """In place, of 32 random bits. Large noise comes of numbers near 0, where fp32 is fine enough for one in 2^33."""
    return x.add_(0.5).mul_(2.0**-32).clamp_(max=ONE_BELOW).neg_().log1p_().neg_().log_().neg_()
