"""Paged keys and values of one shard, in one region of the arena.

A block holds `block_tokens` tokens of all the shard's layers: [blocks, layers, 2, kv_heads, block_tokens, head_dim]. So
growing by a block is growing the region at its end, and the memory beyond any block can be given back.
"""

from __future__ import annotations

import numpy as np
import torch

from workers.memory.arena import Arena


class PagedKv:
    def __init__(
        self,
        arena: Arena,
        name: str,
        *,
        layers: int,
        heads: int,
        head_dim: int,
        block_tokens: int,
        ceiling_blocks: int,
        dtype: torch.dtype,
        budget_bytes: int | None,
    ) -> None:
        self.heads = heads
        self.head_dim = head_dim
        self.block_tokens = block_tokens
        self.ceiling_blocks = ceiling_blocks
        self.blocks = 0
        self.block_bytes = layers * 2 * heads * block_tokens * head_dim * dtype.itemsize
        self._name = name
        self._budget_bytes = budget_bytes
        self._region = arena.reserve(name, max(ceiling_blocks, 1) * self.block_bytes)
        all_blocks = self._region.tensor(dtype, (max(ceiling_blocks, 1), layers, 2, heads, block_tokens, head_dim))
        # One row is one head of one block: what a gather copies.
        self._table = all_blocks.view(-1, block_tokens * head_dim)
        by_token = all_blocks.flatten(2, 3).transpose(2, 3)  # [blocks, layers, block_tokens, 2 * heads, head_dim]
        self._both = [by_token[:, layer] for layer in range(layers)]
        self._keys = [both[:, :, :heads] for both in self._both]
        self._values = [both[:, :, heads:] for both in self._both]
        self._block_rows = layers * 2 * heads
        layer_rows = np.arange(layers, dtype=np.int64)[:, None] * (2 * heads)
        self._row_offsets = (layer_rows + np.arange(2 * heads)).reshape(layers, 2, 1, heads, 1)

    @property
    def committed_bytes(self) -> int:
        return self._region.committed_bytes

    def grow(self, blocks: int) -> None:
        """Make blocks 0..blocks-1 usable and give the rest back. MemoryError changes nothing."""
        if blocks > self.ceiling_blocks:
            raise MemoryError(f"{self._name}: {blocks} blocks asked, {self.ceiling_blocks} reserved")
        size_bytes = blocks * self.block_bytes
        if self._budget_bytes is not None and size_bytes > self._budget_bytes:
            raise MemoryError(f"{self._name}: {blocks} blocks take {size_bytes} bytes, the budget is {self._budget_bytes}")
        self._region.commit(size_bytes)
        self.blocks = blocks

    def rows(self, tables: np.ndarray) -> list[torch.Tensor]:
        """Block tables [sequences, blocks] → by layer, the flat row numbers that `gather` takes."""
        rows = tables[None, None, :, None, :] * self._block_rows + self._row_offsets
        return list(torch.from_numpy(rows.reshape(rows.shape[0], -1)).unbind(0))

    def gather(self, rows: torch.Tensor, sequences: int, tokens: int) -> torch.Tensor:
        """[2, sequences * kv_heads, tokens, head_dim]: keys and values of whole blocks, as a copy."""
        return self._table.index_select(0, rows).view(2, sequences * self.heads, tokens, self.head_dim)

    def write(self, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Token i, [kv_heads, head_dim] of each, to place offsets[i] of block blocks[i]."""
        self._keys[layer].index_put_((blocks, offsets), keys)
        self._values[layer].index_put_((blocks, offsets), values)

    def write_both(self, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, keys_and_values: torch.Tensor) -> None:
        """As `write`, of [tokens, 2 * kv_heads, head_dim] with the keys first."""
        self._both[layer].index_put_((blocks, offsets), keys_and_values)

    def close(self) -> None:
        self._region.close()
