"""How keys and values of one worker group lie in memory. The driver budgets with it, the engines allocate with it.

One block holds `block_tokens` tokens of *all* layers of the stage, so that growing the cache is one commit of more bytes at
the end of one region, and giving back is one commit of fewer: block b is bytes b * block_bytes .. (b + 1) * block_bytes.
"""

from __future__ import annotations

from placement.split import local_kv_heads, stage_layers
from placement.types import ModelShape

__all__ = ["block_bytes", "block_shape", "blocks_for_tokens", "local_kv_heads", "stage_layers"]


def block_shape(shape: ModelShape, layers: int, tensor_parallel: int, block_tokens: int) -> tuple[int, int, int, int, int]:
    """[layers, 2 (keys, values), KV heads of this shard, block_tokens, head_dim] of one block."""
    return (layers, 2, local_kv_heads(shape.kv_heads, tensor_parallel), block_tokens, shape.head_dim)


def block_bytes(shape: ModelShape, layers: int, tensor_parallel: int, block_tokens: int) -> int:
    """Bytes of one block on a rank that holds `layers` decoder layers."""
    size = shape.kv_bytes_per_element
    for dimension in block_shape(shape, layers, tensor_parallel, block_tokens):
        size *= dimension
    return size


def blocks_for_tokens(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)
