"""Attention over paged KV, registered with transformers' attention interface.

A step mixes decodes (one token a sequence) and prefill chunks. Decodes come first in the token order, sorted by length, and
are computed in groups of similar length: the blocks of a group are gathered in one call into [2, group, kv_heads, length,
head_dim], and the query heads that share a KV head become the rows of one small matrix. A prefill chunk is one call of
torch's fused attention, from the chunk alone where nothing is before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from workers.engines.torch.kv import PagedKv

ATTENTION = "modelyard_paged"
_GROUP_SLACK = 1.5  # a group's padded length over its real one, at most
_GROUP_SPARE_TOKENS = 64
# Below so many key elements, a bf16 batched matmul's fixed cost (20 µs) is more than computing in fp32.
_WIDE_ELEMENTS = 64 * 1024


@dataclass(frozen=True)
class Span:
    """One sequence in a step: tokens first..first+count-1 of the step, at positions start.. of the sequence."""

    first: int
    count: int
    start: int
    table: np.ndarray  # its KV block ids

    @property
    def length(self) -> int:
        return self.start + self.count


@dataclass
class _DecodeGroup:
    first: int
    count: int
    rows: list[torch.Tensor]  # by layer: rows of the KV table, flat [2 * count * kv_heads * blocks]
    tokens: int  # length of what is gathered
    mask: torch.Tensor | None  # [count * kv_heads, 1, tokens]
    wide: bool  # compute in fp32 whatever the KV dtype


@dataclass
class _Prefill:
    span: Span
    rows: list[torch.Tensor]  # by layer, empty where the chunk is all there is
    tokens: int  # length of what is gathered
    mask: torch.Tensor | None  # [count, tokens]; None: plain causal over the chunk alone


@dataclass
class AttentionBatch:
    """What every layer of one step shares. Index tensors are made once a step for all layers, per window size."""

    kv: PagedKv
    decodes: list[Span]  # first in the step, by length
    prefills: list[Span]
    dtype: torch.dtype
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    rotary: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # of `fused.RotaryAttention`
    _groups: dict[int | None, list[_DecodeGroup]] = field(default_factory=dict)
    _chunks: dict[int | None, list[_Prefill]] = field(default_factory=dict)

    def groups(self, window: int | None) -> list[_DecodeGroup]:
        found = self._groups.get(window)
        if found is None:
            found = self._groups[window] = [self._group(part, window) for part in _similar(self.decodes)]
        return found

    def chunks(self, window: int | None) -> list[_Prefill]:
        found = self._chunks.get(window)
        if found is None:
            found = self._chunks[window] = [self._chunk(span, window) for span in self.prefills]
        return found

    def _group(self, spans: list[Span], window: int | None) -> _DecodeGroup:
        block_tokens = self.kv.block_tokens
        lengths = np.array([span.length for span in spans])
        begins = np.maximum(lengths - window, 0) if window else np.zeros_like(lengths)
        first_blocks = begins // block_tokens
        counts = -(-lengths // block_tokens) - first_blocks
        width = int(counts.max())
        tables = np.empty((len(spans), width), dtype=np.int64)
        for row, (span, first, count) in enumerate(zip(spans, first_blocks, counts, strict=True)):
            tables[row, :count] = span.table[first : first + count]
            tables[row, count:] = span.table[first]  # masked; its own, so that no sequence reads another's values
        low, high = begins - first_blocks * block_tokens, lengths - first_blocks * block_tokens
        # Whole blocks, also where one sequence is alone: cutting off the rest would make every layer copy what it gathered.
        tokens = width * block_tokens
        position = np.arange(tokens)
        hidden = (position < low[:, None]) | (position >= high[:, None])
        mask = _additive(hidden.repeat(self.kv.heads, axis=0), self.dtype).view(-1, 1, tokens) if hidden.any() else None
        rows = self.kv.rows(tables)
        wide = self.dtype != torch.float32 and len(spans) * self.kv.heads * tokens * self.kv.head_dim <= _WIDE_ELEMENTS
        if wide and mask is not None:
            mask = mask.float()
        return _DecodeGroup(spans[0].first, len(spans), rows, tokens, mask, wide)

    def _chunk(self, span: Span, window: int | None) -> _Prefill:
        block_tokens = self.kv.block_tokens
        if span.start == 0 and (window is None or span.length <= window):
            return _Prefill(span, [], span.count, None)
        first_block = max(span.start + 1 - window, 0) // block_tokens if window else 0
        blocks = -(-span.length // block_tokens) - first_block
        skipped = first_block * block_tokens
        query = np.arange(span.start, span.length)[:, None]
        key = np.arange(skipped, skipped + blocks * block_tokens)
        hidden = key > query
        if window:
            hidden |= key <= query - window
        rows = self.kv.rows(span.table[None, first_block : first_block + blocks])
        return _Prefill(span, rows, blocks * block_tokens, _additive(hidden, self.dtype))


@dataclass
class BatchHolder:
    """The step being computed; one per shard."""

    current: AttentionBatch | None = None


@dataclass(frozen=True)
class LayerAttention:
    """What an attention module needs to find its KV: set as `module.paged` when the stage is built."""

    layer: int
    holder: BatchHolder

    @property
    def batch(self) -> AttentionBatch:
        if self.holder.current is None:
            raise RuntimeError("attention outside a step")
        return self.holder.current


@dataclass(frozen=True)
class AttentionRule:
    scale: float
    window: int | None = None  # tokens that a token sees, itself included
    softcap: float | None = None


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
    paged: LayerAttention = module.paged  # pyright: ignore[reportAssignmentType]
    batch = paged.batch
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    batch.kv.write(paged.layer, batch.write_blocks, batch.write_offsets, k, v)
    rule = AttentionRule(q.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    return attend(batch, paged.layer, q, k, v, rule).unsqueeze(0), None


def attend(
    batch: AttentionBatch, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], already written → [tokens, heads, head_dim]."""
    groups, chunks = batch.groups(rule.window), batch.chunks(rule.window)
    if len(groups) == 1 and not chunks:
        return _decode(q, layer, batch.kv, groups[0], rule)
    out = torch.empty(q.shape, dtype=q.dtype)
    for group in groups:
        part = slice(group.first, group.first + group.count)
        out[part] = _decode(q[part], layer, batch.kv, group, rule)
    for chunk in chunks:
        part = slice(chunk.span.first, chunk.span.first + chunk.span.count)
        out[part] = _prefill(q[part], k[part], v[part], layer, batch.kv, chunk, rule)
    return out


def _decode(q: torch.Tensor, layer: int, kv: PagedKv, group: _DecodeGroup, rule: AttentionRule) -> torch.Tensor:
    count, heads, head_dim = q.shape
    both = kv.gather(group.rows[layer], count, group.tokens)
    queries = q.reshape(count * kv.heads, heads // kv.heads, head_dim)
    if group.wide:
        queries, both = queries.float(), both.float()
    return _plain(queries, both[0], both[1], group.mask, rule).to(q.dtype).view(count, heads, head_dim)


def _prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, kv: PagedKv, chunk: _Prefill, rule: AttentionRule
) -> torch.Tensor:
    queries = q.transpose(0, 1)  # [heads, count, head_dim]
    if chunk.mask is None:
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
    else:
        keys, values = kv.gather(chunk.rows[layer], 1, chunk.tokens).unbind(0)
    if rule.softcap is None:
        mixed = F.scaled_dot_product_attention(
            queries.unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=rule.scale,
            enable_gqa=queries.shape[0] != keys.shape[0],
        )
        return mixed[0].transpose(0, 1)
    mask = chunk.mask
    if mask is None:
        mask = torch.full((q.shape[0], q.shape[0]), float("-inf"), dtype=q.dtype).triu_(1)
    repeats = queries.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0)
    return _plain(queries, keys, values, mask, rule).transpose(0, 1)


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, rule: AttentionRule) -> torch.Tensor:
    """[batch, rows, head_dim] each; the mask is added. For few rows faster than torch's fused kernel; knows softcaps."""
    keys = k.transpose(1, 2)
    if rule.softcap is not None:
        scores = torch.bmm(q, keys).mul_(rule.scale / rule.softcap).tanh_().mul_(rule.softcap)
        scores = scores if mask is None else scores.add_(mask)
    elif mask is None:
        scores = torch.bmm(q, keys).mul_(rule.scale)
    else:
        scores = torch.baddbmm(mask, q, keys, alpha=rule.scale)
    return torch.bmm(torch.softmax(scores, dim=-1), v)


def _similar(spans: list[Span]) -> list[list[Span]]:
    """Neighbours (they are sorted by length) while padding them to the longest costs little."""
    groups: list[list[Span]] = []
    real = 0
    for span in spans:
        if groups:
            padded = (len(groups[-1]) + 1) * span.length
            if padded <= _GROUP_SLACK * (real + span.length) + _GROUP_SPARE_TOKENS:
                groups[-1].append(span)
                real += span.length
                continue
        groups.append([span])
        real = span.length
    return groups


def _additive(hidden: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))


AttentionInterface.register(ATTENTION, paged_attention)
