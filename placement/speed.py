"""How fast a worker group computes, by a cost model: bytes over bandwidth, operations over compute, messages over links.

A step of a group computes one token of each running sequence. It takes a fixed part (weights are read once, whatever the
batch; kernels and messages are started) and a part for each sequence (its keys and values are read, its row is computed).
Both are linear, so a step of n sequences takes `base_s + n * sequence_s`. A prompt takes `prompt_token_s` a token. The stages
of a pipeline work side by side, each on its part of the sequences.

What was measured of the same model, degrees and type of device replaces the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from placement.footprint import kv_bytes, weight_bytes
from placement.hardware import hardware_of
from placement.types import ModelRequest

# Shares of the nominal figures that are reached: 72 % of the memory's speed decoding one stream of Llama-2-7B on an H200
# (results/engine-nvidia-h200-2026-11-30.json); half of the compute is what large prefills reach with library kernels.
_MEMORY_SHARE = 0.72
_COMPUTE_SHARE = 0.5
# A step beside its bytes: planning, launching a graph, fetching tokens. From the same file and, for cpu, that of the engine.
_STEP_S = {"cuda": 0.4e-3, "cpu": 0.5e-3}
# One all-reduce of a few KiB: 20 µs with NCCL over NVLink, 9 µs with MPI between processes. A message to the next stage.
_MESSAGE_S = {"cuda": 20e-6, "cpu": 30e-6}
_BITS_OF_COMPUTE = {"fp8": 8}


@dataclass(frozen=True)
class Speed:
    """Of one worker group."""

    base_s: float
    sequence_s: float
    prompt_token_s: float
    stages: int = 1

    def token_s(self, batch: int) -> float:
        """Between two tokens of one sequence while `batch` of them run."""
        return self.base_s + max(batch / self.stages, 1.0) * self.sequence_s

    def prompt_s(self, tokens: int) -> float:
        """From its start to the first token of an otherwise idle group."""
        return tokens * self.prompt_token_s + self.token_s(1)

    def tokens_per_s(self, batch: int) -> float:
        """Of all sequences together."""
        return batch / self.token_s(batch)


def group_speed(request: ModelRequest, tensor: int, pipeline: int, kind: str, type_: str = "", context: int = 0) -> Speed:
    """`context`: tokens that a sequence has on average; by default half of what the model is asked for."""
    for seen in request.measured_speed:
        if (seen.tensor_parallel, seen.pipeline_parallel, seen.device, seen.type) == (tensor, pipeline, kind, type_):
            return Speed(seen.base_s, seen.sequence_s, seen.prompt_token_s, pipeline)
    hardware = hardware_of(kind, type_)
    shape = request.shape
    stages = range(pipeline)
    weights = sum(weight_bytes(request, tensor, pipeline, stage) for stage in stages) * _experts_share(
        request, request.concurrency
    )
    tokens = context or max(request.context // 2, 1)
    keys = sum(kv_bytes(request, tensor, pipeline, stage, tokens) for stage in stages)
    operations = 2 * _active_elements(request) / tensor
    flops = hardware.flops_8bit if _BITS_OF_COMPUTE.get(_precision(request)) else hardware.flops_16bit
    share = 1.0 if kind == "cpu" else _COMPUTE_SHARE  # the CPU's own figure is what was reached
    memory = hardware.memory_bytes_per_s * (1.0 if kind == "cpu" else _MEMORY_SHARE)
    compute_s = operations / (flops * share)
    # Two all-reduces a layer between the shards, each passing 2 (t - 1) / t of its bytes; one message a stage.
    reduces = 2 * shape.layers if tensor > 1 else 0
    row_bytes = shape.hidden * 2
    row_s = reduces * row_bytes * 2 * (tensor - 1) / tensor / hardware.link_bytes_per_s
    message_s = _MESSAGE_S[kind] * (reduces + pipeline - 1)
    return Speed(
        base_s=weights / memory + message_s + _STEP_S[kind] * pipeline,
        sequence_s=keys / memory + compute_s + row_s + (pipeline - 1) * row_bytes / hardware.link_bytes_per_s,
        prompt_token_s=compute_s / pipeline + row_s + message_s / max(request.batch_tokens, 1),
        stages=pipeline,
    )


def slo_problem(request: ModelRequest, tensor: int, pipeline: int, kind: str, type_: str) -> str:
    """How a group of these degrees would miss what the model promises, at its full concurrency; empty when it would not."""
    slo = request.slo
    if slo is None:
        return ""
    speed = group_speed(request, tensor, pipeline, kind, type_)
    name = hardware_of(kind, type_).name
    where = f"{tensor} × {pipeline} on {name}"
    if slo.token_s is not None:
        token_s = speed.token_s(request.concurrency)
        if token_s > slo.token_s:
            streams = f"{request.concurrency} streams" if request.concurrency > 1 else "one stream"
            return f"{where}: {token_s * 1e3:.1f} ms a token with {streams}, its slo is {slo.token_s * 1e3:.1f} ms"
    if slo.first_token_s is not None:
        first_s = speed.prompt_s(min(slo.prompt_tokens, request.context))
        if first_s > slo.first_token_s:
            prompt = f"a prompt of {min(slo.prompt_tokens, request.context)} tokens"
            return f"{where}: {first_s * 1e3:.0f} ms to the first token of {prompt}, its slo is {slo.first_token_s * 1e3:.0f} ms"
    return ""


def _precision(request: ModelRequest) -> str:
    return request.shape.precision if request.precision == "auto" else request.precision


def _active_elements(request: ModelRequest) -> float:
    """Parameters that one token is multiplied with, head included."""
    shape = request.shape
    layers = sum(part.elements for parts in shape.layer_parts for part in parts if part.matrix)
    if not layers:  # a hand-made shape, 16 bits wide
        return (sum(shape.layer_bytes) + shape.head_bytes) / 2
    head = shape.head_parts or tuple(part for part in shape.embedding_parts if part.split == "vocabulary")
    return layers * _experts_share(request, 1) + sum(part.elements for part in head)


def _experts_share(request: ModelRequest, tokens: int) -> float:
    """Of the experts of a layer, those that a step of so many tokens uses; 1 without experts. Taken of a layer's other weights
    too, which are few beside them."""
    shape = request.shape
    if not shape.experts or not shape.experts_per_token:
        return 1.0
    return 1 - (1 - shape.experts_per_token / shape.experts) ** max(tokens, 1)
