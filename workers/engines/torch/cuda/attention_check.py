"""Whether FlashInfer's kernels are here, compile and compute right on this GPU: asked once a process and kind."""

from __future__ import annotations

import functools
import logging

import numpy as np
import torch

from workers.engines.torch.attention import AttentionRule
from workers.engines.torch.cuda import flash
from workers.engines.torch.cuda.attention import GatheringAttention
from workers.engines.torch.cuda.batch import Pages, Span
from workers.engines.torch.cuda.kv import BlockMajorKv, LayerKv

log = logging.getLogger(__name__)

_BLOCK_TOKENS, _BLOCKS, _KV_HEADS = 16, 8, 2
_TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 3e-2}


@functools.cache
def flash_works(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> bool:
    """`group`: query heads to a KV head. False with the reason in the log; torch's own attention computes then."""
    if dtype not in _TOLERANCE or head_dim not in flash.HEAD_SIZES:
        log.warning("attention of %s with heads of %d runs by torch, slowly: FlashInfer has no kernel for it", dtype, head_dim)
        return False
    if flash.library() is None:
        return False
    try:
        error = _error(device, dtype, head_dim, group)
    except Exception as problem:  # noqa: BLE001 - a compiler that is missing, a kernel that does not fit: all end the same way
        log.warning("FlashInfer does not run here (%s); attention runs by torch, slowly: it needs nvcc at first use", problem)
        return False
    if error > _TOLERANCE[dtype]:
        log.warning("FlashInfer computes attention wrong by %.3g here; attention runs by torch, slowly", error)
        return False
    return True


def _error(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> float:
    """Largest difference to torch's attention: a decode beside a chunk of a prompt, through the prefill and decode kernels."""
    shape = (_BLOCKS, 3, 2, _KV_HEADS, _BLOCK_TOKENS, head_dim)
    both = torch.randn(shape, generator=torch.Generator(device).manual_seed(0), device=device, dtype=dtype)
    kv = BlockMajorKv.__new__(BlockMajorKv)  # a cache that is no region
    kv.heads, kv.head_dim, kv.block_tokens = _KV_HEADS, head_dim, _BLOCK_TOKENS
    kv.layers = [LayerKv(both[:, i, 0], both[:, i, 1], both.stride(2)) for i in range(3)]
    heads = _KV_HEADS * group
    workspace = flash.Workspace(
        torch.empty(flash.FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        torch.empty((flash.PLANS_PER_STEP, flash.PLAN_BYTES), dtype=torch.uint8, device=device),
    )
    ours, plain = flash.FlashAttention(kv, heads, dtype, workspace), GatheringAttention(kv)
    rule = AttentionRule(head_dim**-0.5)
    spans = [Span(1, 36, np.array([5, 1, 6], np.int32)), Span(20, 7, np.array([0, 3], np.int32))]
    pages = Pages(_ints([0, 1, 21]), _ints([0, 3, 5]), _ints([5, 1, 6, 0, 3]), _ints([5, 11]))
    q = torch.randn((21, heads, head_dim), generator=torch.Generator(device).manual_seed(1), device=device, dtype=dtype)
    plain.plan(spans, pages)
    wanted = plain.run(1, q, rule)
    ours.plan(spans, pages)
    errors = [ours.run(1, q, rule) - wanted]
    first = Pages(_ints([0, 1]), _ints([0, 3]), _ints([5, 1, 6]), _ints([5]))
    memory = flash.DecodePages(first.starts.to(device), first.blocks.to(device), first.last_tokens.to(device))
    ours.plan_decode(first, memory)
    errors.append(ours.run(1, q[:1], rule) - wanted[:1])
    return max(float(error.abs().max()) for error in errors)


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
