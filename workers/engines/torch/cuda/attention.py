"""Attention over the paged cache: what every kind of it promises, the plain kind, and its place in transformers' models."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from workers.engines.torch.attention import AttentionRule
from workers.engines.torch.cuda import ops
from workers.engines.torch.cuda.batch import Pages, Span, Tokens
from workers.engines.torch.cuda.kv import BlockMajorKv

ATTENTION = "modelyard_paged_gpu"
log = logging.getLogger(__name__)


class Attention(Protocol):
    """Of one shard. `plan` once a step, then `run` once a layer; both enqueue and do not wait."""

    def plan(self, spans: list[Span], pages: Pages) -> None: ...

    def run(self, layer: int, q: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        """q [tokens, heads, head_dim] → the same. Keys and values of these tokens are in the cache already."""
        ...


class GatheringAttention:
    """torch's own attention over gathered blocks, sequence by sequence: for what no library takes (fp32, odd head sizes)."""

    def __init__(self, kv: BlockMajorKv) -> None:
        self._kv = kv
        self._spans: list[Span] = []
        self._tables: list[torch.Tensor] = []

    def plan(self, spans: list[Span], pages: Pages) -> None:
        self._spans = spans
        self._tables = list(pages.blocks.long().split((pages.starts[1:] - pages.starts[:-1]).tolist()))

    def run(self, layer: int, q: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        out = torch.empty_like(q)
        first = 0
        for span, table in zip(self._spans, self._tables, strict=True):
            part = slice(first, first + span.count)
            keys, values = self._kv.layers[layer].gather(table.to(q.device), span.length)
            out[part] = _attend(q[part].transpose(0, 1), keys, values, span.start, rule).transpose(0, 1)
            first += span.count
        return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, rule: AttentionRule) -> torch.Tensor:
    """q [heads, count, head_dim] at positions start.., k and v [kv_heads, length, head_dim]."""
    query = torch.arange(start, start + q.shape[1], device=q.device).unsqueeze(1)
    key = torch.arange(k.shape[1], device=q.device)
    seen = key <= query
    if rule.window is not None:
        seen &= key > query - rule.window
    repeats = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
    if rule.softcap is None:
        return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, scale=rule.scale)[0]
    scores = torch.tanh(q.float() @ k.float().transpose(1, 2) * (rule.scale / rule.softcap)) * rule.softcap
    return (torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1) @ v.float()).to(q.dtype)


# ---------------------------------------------------------------- inside transformers' own modules


@dataclass
class Current:
    """The step being enqueued; one per shard."""

    tokens: Tokens | None = None


@dataclass(frozen=True)
class Slot:
    """What an attention module of transformers needs to find its cache: set as `module.paged`."""

    layer: int
    kv: BlockMajorKv
    attention: Attention
    current: Current


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, tokens, head_dim], key and value with kv_heads → [1, tokens, heads, head_dim]."""
    slot: Slot = module.paged  # pyright: ignore[reportAssignmentType]
    tokens = slot.current.tokens
    if tokens is None:
        raise RuntimeError("attention outside a step")
    q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    ops.append(k, v, tokens.positions, tokens.blocks, slot.kv.layers[slot.layer])
    rule = AttentionRule(q.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    return slot.attention.run(slot.layer, q, rule).unsqueeze(0), None


AttentionInterface.register(ATTENTION, paged_attention)
