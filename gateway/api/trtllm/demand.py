"""From a model's specification and its checkpoint to what TensorRT-LLM is asked for."""

from __future__ import annotations

from gateway.api.checkpoint.checkpoint import Checkpoint
from gateway.api.config import ModelSpec
from gateway.api.errors import invalid
from gateway.api.trtllm.arguments import Demand


def demand_of(model: str, spec: ModelSpec, checkpoint: Checkpoint, tensor: int, pipeline: int) -> Demand:
    """Without the bytes for KV, which the placement decides."""
    if checkpoint.format != "safetensors":
        raise invalid(
            f"model `{model}`: {checkpoint.path} is {checkpoint.format}, which TensorRT-LLM does not read; give it a Hugging "
            "Face directory of safetensors, or use engine: torch",
            field="source",
        )
    return Demand(
        model=model,
        path=str(checkpoint.path),
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        context=min(spec.context or checkpoint.max_context, checkpoint.max_context),
        concurrency=spec.limits.concurrency,
        batch_tokens=spec.limits.batch_tokens,
        kv_bytes=0,
        kv_tokens=0,
        kv_block_tokens=spec.kv.block_tokens,
        prefix_cache=spec.kv.prefix_cache,
        precision=spec.precision,
        stored_precision=checkpoint.precision,
        quantization=checkpoint.quantization,
        kv_dtype="fp8" if checkpoint.kv_quantization == "FP8" else "auto",
    )
