"""Paged keys and values of one shard on a GPU, in one region of the arena.

A block holds `block_tokens` tokens of all the shard's layers: [blocks, layers, 2, kv_heads, block_tokens, head_dim]. So growing
by a block is growing the region at its end. To the attention kernels each layer is a view whose block stride is a whole block;
heads, tokens and elements within a block lie as they would in a cache of that layer alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.memory.arena import Arena


@dataclass(frozen=True)
class LayerKv:
    """One layer: keys and values, each [blocks, kv_heads, block_tokens, head_dim], as views with equal strides."""

    keys: torch.Tensor
    values: torch.Tensor
    value_offset: int  # elements from a key to its value

    @property
    def heads(self) -> int:
        return self.keys.shape[1]

    @property
    def block_tokens(self) -> int:
        return self.keys.shape[2]

    def write(self, positions: torch.Tensor, blocks: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Token i, [kv_heads, head_dim] of each, to offset positions[i] mod block_tokens of block blocks[i] (-1: nowhere)."""
        placed = blocks >= 0
        blocks, offsets = blocks[placed].long(), positions[placed].long() % self.block_tokens
        self.keys.transpose(1, 2)[blocks, offsets] = k[placed]
        self.values.transpose(1, 2)[blocks, offsets] = v[placed]

    def gather(self, blocks: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of the first `tokens` tokens in these blocks, each [kv_heads, tokens, head_dim], as copies."""
        keys, values = (
            part[blocks].transpose(0, 1).reshape(self.heads, -1, part.shape[-1])[:, :tokens] for part in (self.keys, self.values)
        )
        return keys, values


class BlockMajorKv:
    """All layers of a shard, elastic: blocks 0..`blocks`-1 are usable."""

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
    ) -> None:
        ceiling = max(ceiling_blocks, 1)
        self.heads = heads
        self.head_dim = head_dim
        self.block_tokens = block_tokens
        self.ceiling_blocks = ceiling_blocks
        self.blocks = 0
        self.block_bytes = layers * 2 * heads * block_tokens * head_dim * dtype.itemsize
        self._name = name
        self._region = arena.reserve(name, ceiling * self.block_bytes)
        both = self._region.tensor(dtype, (ceiling, layers, 2, heads, block_tokens, head_dim))
        apart = heads * block_tokens * head_dim
        self.layers = [LayerKv(both[:, layer, 0], both[:, layer, 1], apart) for layer in range(layers)]

    @property
    def committed_bytes(self) -> int:
        return self._region.committed_bytes

    def grow(self, blocks: int) -> None:
        """Make blocks 0..blocks-1 usable and give the rest back; the work that used it is over. MemoryError changes nothing."""
        if blocks > self.ceiling_blocks:
            raise MemoryError(f"{self._name}: {blocks} blocks asked, {self.ceiling_blocks} reserved")
        self._region.commit(blocks * self.block_bytes)
        self.blocks = blocks

    def close(self) -> None:
        """Tensors into it must not be used any more."""
        self.layers = []
        self._region.close()
