"""How tensor and pipeline parallelism divide a model, and which degrees can."""

from __future__ import annotations

from placement.types import ModelShape, Split

VOCABULARY_ALIGNMENT = 64  # vocabulary entries of a shard are padded to a multiple of it


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """The decoder layers of one pipeline stage: contiguous, as even as can be, the earlier stages take the remainder."""
    share, remainder = divmod(layers, stages)
    first = stage * share + min(stage, remainder)
    return range(first, first + share + (1 if stage < remainder else 0))


def local_kv_heads(kv_heads: int, tensor_parallel: int) -> int:
    """KV heads on one shard. With more shards than heads every shard keeps a copy of one."""
    return max(1, kv_heads // tensor_parallel)


def shard_elements(shape: ModelShape, split: Split, elements: int, tensor_parallel: int) -> int:
    """Elements of one shard's part of tensors with `elements` in all; the largest shard's where they differ."""
    if tensor_parallel == 1 or split == "replicated":
        return elements
    if split == "kv_heads":
        return elements // shape.kv_heads * local_kv_heads(shape.kv_heads, tensor_parallel)
    if split == "vocabulary":
        rows = -(-shape.vocabulary // tensor_parallel)
        padded = -(-rows // VOCABULARY_ALIGNMENT) * VOCABULARY_ALIGNMENT
        return elements // shape.vocabulary * padded
    return -(-elements // tensor_parallel)


def tensor_parallel_problem(shape: ModelShape, degree: int) -> str | None:
    """Why a model cannot be divided into so many shards; None when it can."""
    if degree == 1:
        return None
    if shape.encoder:
        return "encoders are computed on one rank"
    if shape.heads % degree:
        return f"its {shape.heads} attention heads do not divide by {degree}"
    if shape.kv_heads % degree and degree % shape.kv_heads:
        return f"its {shape.kv_heads} KV heads and {degree} shards do not divide each other"
    for width in (shape.expert_intermediate or shape.intermediate, shape.intermediate):
        if width % degree:
            return f"its intermediate size of {width} does not divide by {degree}"
    return None


def pipeline_parallel_problem(shape: ModelShape, stages: int) -> str | None:
    if shape.encoder and stages > 1:
        return "encoders are computed on one rank"
    if stages > shape.layers:
        return f"its {shape.layers} layers are fewer than {stages} stages"
    return None
