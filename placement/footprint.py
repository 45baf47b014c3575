"""Bytes that one worker group takes on each of its ranks, by what they are for.

Weights are exact under the split; workspace, communication and graphs are estimates until a load has measured them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from placement.split import local_kv_heads, shard_elements, stage_layers
from placement.types import ModelRequest, ModelShape, WeightPart

MIB = 2**20
# Bits a matrix element takes in memory. int4: 4-bit values in groups of 32 with a 16-bit scale and zero point; int8: a scale
# a row is below 0.1 % and left out.
_MATRIX_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 5}
_NARROW = ("int4", "int8", "fp8")  # conversion is of the layers: embeddings and head stay 16 bits wide
# NCCL's buffers with default channels, measured by others between 100 and 400 MiB a communicator; MPI's are a few MiB.
_COMMUNICATION_BYTES = {"cuda": 256 * MIB, "cpu": 8 * MIB}
_GRAPH_BYTES = {"cuda": 192 * MIB, "cpu": 0}  # decode graphs share one memory pool


# What a load takes beyond the sums: every region is rounded up to whole pages, and engines keep tables and padding beside
# the matrices. Nothing is left of it once a load has been measured.
PAGE_BYTES = 2 * MIB
_SLACK_BYTES = 12 * PAGE_BYTES
_SLACK_SHARE = 0.03


@dataclass(frozen=True)
class RankFootprint:
    """Reserved on one rank while the group is resident."""

    weights: int
    kv_floor: int
    workspace: int
    communication: int = 0
    graphs: int = 0
    slack: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv_floor + self.workspace + self.communication + self.graphs + self.slack


def group_footprint(
    request: ModelRequest, tensor_parallel: int, pipeline_parallel: int, device: str
) -> tuple[RankFootprint, ...]:
    """One entry a pipeline stage (the shards of a stage are alike): ranks[stage * tensor_parallel + shard] has entry `stage`."""
    floors = kv_floor_bytes(request, tensor_parallel, pipeline_parallel)
    weights = [
        weight_bytes(request.shape, request.precision, tensor_parallel, pipeline_parallel, stage)
        for stage in range(pipeline_parallel)
    ]
    return tuple(
        RankFootprint(
            weights=weights[stage],
            kv_floor=floors[stage],
            workspace=workspace_bytes(request, tensor_parallel, last=stage == pipeline_parallel - 1),
            communication=_COMMUNICATION_BYTES[device] if tensor_parallel * pipeline_parallel > 1 else 0,
            graphs=_GRAPH_BYTES[device],
            slack=int(weights[stage] * _SLACK_SHARE) + _SLACK_BYTES,
        )
        for stage in range(pipeline_parallel)
    )


def weight_bytes(shape: ModelShape, precision: str, tensor_parallel: int, pipeline_parallel: int, stage: int) -> int:
    """Weights of one rank of `stage`. Tied embeddings are held by the first and by the last stage, once where these are one."""
    first, last = stage == 0, stage == pipeline_parallel - 1
    layers = stage_layers(shape.layers, pipeline_parallel, stage)
    wanted = shape.precision if precision == "auto" else precision
    if not shape.layer_parts:
        outside = shape.embedding_bytes if first or (last and shape.tied_embeddings) else 0
        outside += shape.head_bytes if last else 0
        return -(-(sum(shape.layer_bytes[layer] for layer in layers) + outside) // tensor_parallel)
    total = 0
    cache: dict[int, int] = {}  # most layers share one tuple of parts
    for layer in layers:
        parts = shape.layer_parts[layer]
        if id(parts) not in cache:
            cache[id(parts)] = _resident(shape, parts, wanted, tensor_parallel)
        total += cache[id(parts)]
    as_stored = shape.resident_as_stored and wanted == shape.precision
    outside = "bf16" if wanted in _NARROW and not as_stored else wanted
    if first:
        total += _resident(shape, shape.embedding_parts, outside, tensor_parallel)
    elif last and shape.tied_embeddings:
        tokens = [part for part in shape.embedding_parts if part.split == "vocabulary"]
        total += _resident(shape, tokens, outside, tensor_parallel)
    if last:
        total += _resident(shape, shape.head_parts + shape.final_parts, outside, tensor_parallel)
    return total


def _resident(shape: ModelShape, parts: Iterable[WeightPart], precision: str, tensor_parallel: int) -> int:
    total = 0
    for part in parts:
        elements = shard_elements(shape, part.split, part.elements, tensor_parallel)
        if precision == shape.precision and shape.resident_as_stored:
            total += elements * part.bytes // part.elements  # whatever mixture of types that is
        elif part.matrix and precision in _MATRIX_BITS:
            total += -(-elements * _MATRIX_BITS[precision] // 8)
        else:
            total += elements * (4 if precision == "fp32" else 2)
    return total


def kv_bytes(request: ModelRequest, tensor_parallel: int, pipeline_parallel: int, stage: int, tokens: int) -> int:
    """Keys and values of one sequence of `tokens` tokens on one rank.

    The torch engine keeps every token of every layer as heads; TensorRT-LLM drops what has left a layer's window and keeps
    latent attention compressed.
    """
    shape = request.shape
    compact = request.engine == "trtllm"
    elements = 2 * local_kv_heads(shape.kv_heads, tensor_parallel) * shape.head_dim
    if compact and shape.latent_elements:
        elements = shape.latent_elements
    layers = stage_layers(shape.layers, pipeline_parallel, stage)
    kept = len(layers) * tokens
    if compact and shape.layer_windows:
        kept = sum(min(tokens, shape.layer_windows[layer] or tokens) for layer in layers)
    return kept * elements * shape.kv_bytes_per_element


def kv_floor_bytes(request: ModelRequest, tensor_parallel: int, pipeline_parallel: int) -> tuple[int, ...]:
    """Reserved on each rank of every stage: the floor in whole blocks, the same number of blocks on every stage, and never
    less than one sequence of full context, for a group that cannot hold one cannot serve it. At most the ceiling.
    """
    stages = range(pipeline_parallel)
    ceiling = request.kv_ceiling_bytes
    if request.engine == "trtllm":  # told in bytes, and its blocks differ by layer
        one = [kv_bytes(request, tensor_parallel, pipeline_parallel, stage, request.context) for stage in stages]
        return tuple(min(max(request.kv_floor_bytes, size), ceiling or sys.maxsize) for size in one)
    per_block = [kv_bytes(request, tensor_parallel, pipeline_parallel, stage, request.kv_block_tokens) for stage in stages]
    blocks = -(-request.context // request.kv_block_tokens)
    blocks = max(blocks, *(-(-request.kv_floor_bytes // size) for size in per_block))
    if ceiling is not None:
        blocks = min(blocks, *(ceiling // size for size in per_block))
    return tuple(blocks * size for size in per_block)


def workspace_bytes(request: ModelRequest, tensor_parallel: int, *, last: bool) -> int:
    """Activations of one step at its token limit, and on the last stage logits of every sequence and their fp32 copy.

    A decoder layer's live tensors are the residual stream, its normed copy, q/k/v, the attention output (each about `hidden`
    wide) and gate, up and their product (`intermediate` wide).
    """
    shape = request.shape
    width = 4 if (shape.precision if request.precision == "auto" else request.precision) == "fp32" else 2
    per_token = 6 * shape.hidden + -(-3 * shape.intermediate // tensor_parallel)
    logits = 2 * 4 * request.concurrency * shape.vocabulary if last else 0
    return request.batch_tokens * per_token * width + logits
