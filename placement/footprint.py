"""Bytes that one worker group takes on each of its ranks, by what they are for.

Weights are exact under the split; workspace, communication and graphs are estimates until a load has measured them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace

from placement.split import local_kv_heads, shard_elements, stage_layers
from placement.types import Measured, ModelRequest, ModelShape, WeightPart

MIB = 2**20
# Bits a matrix element takes in memory. int4: 4-bit values in groups of 32 with a 16-bit scale and zero point; int8: a scale
# a row is below 0.1 % and left out.
_MATRIX_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 5}
_NARROW = ("int4", "int8", "fp8")  # what the layers may be narrowed to; embeddings and norms stay 16 bits wide
# NCCL's buffers with default channels: 292 to 318 MiB a communicator of two H200s; MPI's are a few MiB.
_COMMUNICATION_BYTES = {"cuda": 320 * MIB, "cpu": 8 * MIB}
# Processes of its own for each model: CUDA context, library workspaces, buffers of the runtime. An estimate; loads measure it.
_PROCESS_BYTES = {"torch": 0, "trtllm": 1024 * MIB}
_GRAPH_BYTES = {"cuda": 192 * MIB, "cpu": 0}  # decode graphs share one memory pool


# What a pool driver gives a load beyond the sums (`workers.driver.sizing`): engines keep tables, padding and a head in two
# forms beside the matrices, and each of four regions is rounded up to whole pages. Nothing is left of it once a load has been
# measured, but a page a region: room for what a load takes for a moment only.
PAGE_BYTES = {"cpu": 2 * MIB, "cuda": 32 * MIB}
_REGIONS = 4
_SLACK_BYTES = 60 * MIB
_SLACK_SHARE = 0.1


@dataclass(frozen=True)
class _Layout:
    """How an engine keeps what stands outside the layers."""

    keeps_stored: bool  # the checkpoint's own mixture of types; else all becomes one precision
    divides_embedding: bool
    pads_vocabulary: bool  # to divide it; else it is divided only where that is even
    shares_tied_head: bool  # one matrix for look-up and output where one rank has both
    head_is_narrow: bool
    keeps_exact_head: bool  # beside an undivided 4-bit one, in 16 bits; a tied embedding on the same rank serves as it


_LAYOUTS = {
    "torch": _Layout(
        False, divides_embedding=False, pads_vocabulary=False, shares_tied_head=False, head_is_narrow=True, keeps_exact_head=True
    ),
    "trtllm": _Layout(
        True, divides_embedding=True, pads_vocabulary=True, shares_tied_head=True, head_is_narrow=False, keeps_exact_head=False
    ),
}


@dataclass(frozen=True)
class RankFootprint:
    """Reserved on one rank while the group is resident."""

    weights: int
    kv_floor: int
    workspace: int
    communication: int = 0
    graphs: int = 0
    slack: int = 0
    measured: bool = False  # by earlier loads; workspace then has communication and graphs in it

    @property
    def total(self) -> int:
        return self.weights + self.kv_floor + self.workspace + self.communication + self.graphs + self.slack


def group_footprint(
    request: ModelRequest, tensor_parallel: int, pipeline_parallel: int, device: str, type_: str = ""
) -> tuple[RankFootprint, ...]:
    """One entry a pipeline stage (the shards of a stage are alike): ranks[stage * tensor_parallel + shard] has entry `stage`.

    What was measured at an earlier load of the same sort is taken as it is; keys and values are always computed. `type_` of the
    devices; empty: whichever the site has.
    """
    floors = kv_floor_bytes(request, tensor_parallel, pipeline_parallel)
    seen = measured_of(request, tensor_parallel, pipeline_parallel, device, type_)
    if seen is not None:
        return tuple(
            RankFootprint(weights, floor, workspace, slack=_measured_slack(weights + floor + workspace, device), measured=True)
            for weights, floor, workspace in zip(seen.weights, floors, seen.workspace, strict=True)
        )
    weights = [weight_bytes(request, tensor_parallel, pipeline_parallel, stage) for stage in range(pipeline_parallel)]
    # The same on every stage: whichever computes the logits, the others hold its messages.
    workspace = max(
        workspace_bytes(request, tensor_parallel, last=stage == pipeline_parallel - 1) for stage in range(pipeline_parallel)
    )
    workspace += _PROCESS_BYTES[request.engine]
    graphs = _GRAPH_BYTES[device]
    return tuple(
        RankFootprint(
            weights=weights[stage],
            kv_floor=floors[stage],
            workspace=workspace,
            communication=_COMMUNICATION_BYTES[device] if tensor_parallel * pipeline_parallel > 1 else 0,
            graphs=graphs,
            slack=_slack(weights[stage] + workspace + graphs, floors[stage], device),
        )
        for stage in range(pipeline_parallel)
    )


def measured_of(
    request: ModelRequest, tensor_parallel: int, pipeline_parallel: int, device: str, type_: str = ""
) -> Measured | None:
    """What earlier loads of the same sort took."""
    wanted = (request.engine, request.precision, tensor_parallel, pipeline_parallel, device)
    found = {
        seen.type: seen
        for seen in request.measured
        if (seen.engine, seen.precision, seen.tensor_parallel, seen.pipeline_parallel, seen.device) == wanted
    }
    return found.get(type_) or found.get("")


def common_type(types: Iterable[str]) -> str:
    """Of a group's devices; empty when they differ."""
    found = set(types)
    return found.pop() if len(found) == 1 else ""


def _measured_slack(taken: int, device: str) -> int:
    """So that the sum is whole pages, and each region has one to spare."""
    page = PAGE_BYTES[device]
    return _REGIONS * page + -taken % page


def _slack(estimated: int, kv_floor: int, device: str) -> int:
    """So that the sum is whole pages."""
    page = PAGE_BYTES[device]
    slack = int(estimated * _SLACK_SHARE) + _SLACK_BYTES + _REGIONS * page
    return slack + -(estimated + kv_floor + slack) % page


def weight_bytes(request: ModelRequest, tensor_parallel: int, pipeline_parallel: int, stage: int) -> int:
    """Weights of one rank of `stage`."""
    shape, layout = request.shape, _LAYOUTS[request.engine]
    first, last = stage == 0, stage == pipeline_parallel - 1
    layers = stage_layers(shape.layers, pipeline_parallel, stage)
    if not shape.layer_parts:
        outside = shape.embedding_bytes if first or (last and shape.tied_embeddings) else 0
        outside += shape.head_bytes if last else 0
        return -(-(sum(shape.layer_bytes[layer] for layer in layers) + outside) // tensor_parallel)
    wanted = _wanted(request)
    as_stored = layout.keeps_stored and shape.resident_as_stored and wanted == shape.precision
    outside_precision = "bf16" if wanted in _NARROW else wanted
    head_precision = wanted if layout.head_is_narrow else outside_precision

    def resident(parts: Iterable[WeightPart], precision: str) -> int:
        return _resident(shape, parts, None if as_stored else precision, tensor_parallel)

    sums: dict[int, int] = {}  # most layers share one tuple of parts
    total = 0
    for layer in layers:
        parts = shape.layer_parts[layer]
        if id(parts) not in sums:
            sums[id(parts)] = resident(parts, wanted)
        total += sums[id(parts)]
    tokens = [part for part in shape.embedding_parts if part.split == "vocabulary"]
    if first:
        embedding = shape.embedding_parts
        if not layout.divides_embedding:
            embedding = tuple(replace(part, split="replicated") for part in embedding)
        total += resident(embedding, outside_precision)
    if last:
        head = tokens if shape.tied_embeddings and not (first and layout.shares_tied_head) else shape.head_parts
        if not layout.pads_vocabulary:
            split = "hidden" if shape.vocabulary % tensor_parallel == 0 else "replicated"
            head = [replace(part, split=split) for part in head]
        total += resident(head, head_precision) + resident(shape.final_parts, outside_precision)
        if (
            layout.keeps_exact_head
            and head_precision == "int4"
            and tensor_parallel == 1
            and not (first and shape.tied_embeddings)
        ):
            total += resident(head, outside_precision)
    return total


def _resident(shape: ModelShape, parts: Iterable[WeightPart], precision: str | None, tensor_parallel: int) -> int:
    """`precision` None: as stored, whatever mixture of types that is."""
    total = 0
    for part in parts:
        elements = shard_elements(shape, part.split, part.elements, tensor_parallel)
        if precision is None:
            total += elements * part.bytes // part.elements
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
    width = shape.kv_bytes_per_element
    if request.engine == "torch":  # keys and values are what it computes in
        width = 4 if _wanted(request) == "fp32" else 2
    return kept * elements * width


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
    if not request.shape.encoder:
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
    width = 4 if _wanted(request) == "fp32" else 2
    per_token = 6 * shape.hidden + -(-3 * shape.intermediate // tensor_parallel)
    logits = 2 * 4 * request.concurrency * shape.vocabulary if last else 0
    return request.batch_tokens * per_token * width + logits


def _wanted(request: ModelRequest) -> str:
    return request.shape.precision if request.precision == "auto" else request.precision
