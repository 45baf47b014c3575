"""Attention by FlashInfer's kernels over the strided layers of the block-major cache.

The kernels take the stride of a whole block as they take that of one layer's own cache, at the same speed (ops/bench/results).
Decode steps run inside CUDA graphs: their wrappers are made once a batch size, read their pages from memory that stays, and are
planned anew for every step. A plan is copied to the GPU from pinned memory, of which there are several, so that the plan of
the next step may be made while the copy of this one waits its turn.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch

from workers.engines.torch.attention import AttentionRule
from workers.engines.torch.cuda.batch import Pages, Span
from workers.engines.torch.cuda.kv import BlockMajorKv

log = logging.getLogger(__name__)

FLOAT_WORKSPACE_BYTES = 128 * 2**20  # FlashInfer's recommendation; partial results of split sequences
PLAN_BYTES = 2 * 2**20  # of one plan: some integers a tile
PLANS_PER_STEP = 4  # a model may have so many kinds of layers (windows, softcaps)
HEAD_SIZES = (64, 128, 256)
_LAYOUT = "HND"  # [blocks, heads, tokens, head_dim]
_TENSOR_CORE_GROUP = 4  # query heads to a KV head from which on tensor cores pay in decode
_PLANS_IN_FLIGHT = 2 * PLANS_PER_STEP


@functools.cache
def library() -> Any:
    """The module `flashinfer`, or None with the reason in the log."""
    try:
        import flashinfer  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError, RuntimeError) as error:
        log.warning("FlashInfer cannot be imported (%s); attention runs by torch, slowly: install modelyard[cuda]", error)
        return None
    return flashinfer


@dataclass
class Workspace:
    """Device memory for plans and partial results. One shard's steps use it one after the other."""

    floats: torch.Tensor  # [FLOAT_WORKSPACE_BYTES] uint8
    plans: torch.Tensor  # [PLANS_PER_STEP, PLAN_BYTES] uint8

    def __post_init__(self) -> None:
        self._pinned = [torch.empty(PLAN_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_PLANS_IN_FLIGHT)]
        self._copied: list[torch.cuda.Event | None] = [None] * _PLANS_IN_FLIGHT
        self._turn = 0

    def lend(self, wrapper: Any, kind: int) -> None:
        """To a wrapper that is about to plan for layers of one kind."""
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        wrapper._float_workspace_buffer = self.floats
        wrapper._int_workspace_buffer = self.plans[kind]
        wrapper._pin_memory_int_workspace_buffer = self._pinned[self._turn]

    def planned(self) -> None:
        """The plan's copy is enqueued."""
        event = torch.cuda.Event()
        event.record()
        self._copied[self._turn] = event
        self._turn = (self._turn + 1) % _PLANS_IN_FLIGHT


@dataclass(frozen=True)
class DecodePages:
    """Device memory that stays, of one decode batch size: int32."""

    starts: torch.Tensor
    blocks: torch.Tensor
    last_tokens: torch.Tensor


class FlashAttention:
    def __init__(self, kv: BlockMajorKv, heads: int, dtype: torch.dtype, workspace: Workspace) -> None:
        self._kv = kv
        self._heads = heads
        self._dtype = dtype
        self._workspace = workspace
        self._rules: list[AttentionRule] = []  # of this model's layers, as they were met
        self._prefill: dict[AttentionRule, Any] = {}
        self._decode: dict[tuple[int, AttentionRule], Any] = {}
        self._planned: dict[AttentionRule, Any] = {}
        self._pages: Pages | None = None
        self._captured: DecodePages | None = None

    def expect(self, rules: list[AttentionRule]) -> None:
        """Rules that steps will ask for. Others are planned when they are first met, outside of graphs."""
        self._rules.extend(rule for rule in dict.fromkeys(rules) if rule not in self._rules)
        if len(self._rules) > PLANS_PER_STEP:
            raise RuntimeError(
                f"layers of {len(self._rules)} kinds of attention in one model, at most {PLANS_PER_STEP} are planned for"
            )

    def plan(self, spans: list[Span], pages: Pages) -> None:
        self._pages, self._captured = pages, None
        self._planned = {rule: self._plan_prefill(rule, pages) for rule in self._rules}

    def plan_decode(self, pages: Pages, memory: DecodePages) -> None:
        """A step of one token a sequence; `memory` will hold what `pages` says when the kernels run."""
        self._pages, self._captured = pages, memory
        self._planned = {rule: self._plan_decode(rule, pages, memory) for rule in self._rules}

    def run(self, layer: int, q: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        wrapper = self._planned.get(rule)
        if wrapper is None:
            assert self._pages is not None
            self.expect([rule])
            planned = (
                self._plan_prefill(rule, self._pages)
                if self._captured is None
                else self._plan_decode(rule, self._pages, self._captured)
            )
            wrapper = self._planned[rule] = planned
        cache = self._kv.layers[layer]
        return wrapper.run(q, (cache.keys, cache.values))

    def _plan_prefill(self, rule: AttentionRule, pages: Pages) -> Any:
        wrapper = self._prefill.get(rule)
        if wrapper is None:
            # fa2: fa3 reads paged KV through one index a token and takes minutes to compile.
            wrapper = library().BatchPrefillWithPagedKVCacheWrapper(self._workspace.floats, _LAYOUT, backend="fa2")
            self._prefill[rule] = wrapper
        self._workspace.lend(wrapper, self._rules.index(rule))
        wrapper.plan(
            pages.query_starts,
            pages.starts,
            pages.blocks,
            pages.last_tokens,
            self._heads,
            self._kv.heads,
            self._kv.head_dim,
            self._kv.block_tokens,
            causal=True,
            q_data_type=self._dtype,
            **_options(rule),
        )
        self._workspace.planned()
        return wrapper

    def _plan_decode(self, rule: AttentionRule, pages: Pages, memory: DecodePages) -> Any:
        sequences = memory.last_tokens.shape[0]
        sizes = (self._heads, self._kv.heads, self._kv.head_dim, self._kv.block_tokens)
        wrapper = self._decode.get((sequences, rule))
        if wrapper is not None:
            self._workspace.lend(wrapper, self._rules.index(rule))
            library().fast_decode_plan(
                wrapper,
                pages.starts,
                pages.blocks,
                pages.last_tokens,
                *sizes,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                global_override_indptr_cpu=pages.starts,
                **_options(rule),
            )
        else:
            wrapper = library().BatchDecodeWithPagedKVCacheWrapper(
                self._workspace.floats,
                _LAYOUT,
                use_cuda_graph=True,
                use_tensor_cores=self._heads // self._kv.heads >= _TENSOR_CORE_GROUP,
                paged_kv_indptr_buffer=memory.starts,
                paged_kv_indices_buffer=memory.blocks,
                paged_kv_last_page_len_buffer=memory.last_tokens,
            )
            self._decode[sequences, rule] = wrapper
            self._workspace.lend(wrapper, self._rules.index(rule))
            wrapper.plan(pages.starts, pages.blocks, pages.last_tokens, *sizes, q_data_type=self._dtype, **_options(rule))
        self._workspace.planned()
        return wrapper


def _options(rule: AttentionRule) -> dict[str, Any]:
    return {
        "window_left": -1 if rule.window is None else rule.window - 1,
        "logits_soft_cap": rule.softcap,
        "sm_scale": rule.scale,
    }
