"""The built-in engine: loading a shard of a model for torch on CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from gateway.api.checkpoint import Checkpoint, open_checkpoint
from gateway.api.config import ModelSpec
from placement.split import local_kv_heads
from workers.comm.base import GroupComm
from workers.engines.base import ProgressFn
from workers.engines.torch.attention import BatchHolder, LayerAttention
from workers.engines.torch.constraint import constraints_of
from workers.engines.torch.encoder import EncoderShard, load_encoder
from workers.engines.torch.fill import Precision, StageFiller, precision_of
from workers.engines.torch.fused import fuse_blocks
from workers.engines.torch.kv import PagedKv
from workers.engines.torch.linear import DenseLinear, Int4Linear, Int8Linear
from workers.engines.torch.memory import TensorRegion
from workers.engines.torch.parallel import ParallelPlan
from workers.engines.torch.shard import ShardFacts, TorchShard
from workers.engines.torch.source import weight_source
from workers.engines.torch.stage import StageModel, build_stage, shorten_lookups
from workers.engines.torch.threads import ComputeThreads
from workers.memory.arena import Arena
from workers.messages import LoadShard

_CONVERTING = 0.5  # share of the progress bar
_SAMPLE_TOKENS = 8


class TorchEngine:
    def __init__(self, cache_dir: Path) -> None:
        """`cache_dir` keeps converted weights, by digest; ranks of one machine share it."""
        self._cache_dir = cache_dir

    def load(
        self, command: LoadShard, rank: int, arena: Arena, comm: GroupComm, progress: ProgressFn
    ) -> TorchShard | EncoderShard:
        spec = ModelSpec.model_validate_json(command.spec_json)
        torch.set_num_threads(1)  # of the loading thread: the cores belong to the steps of other models (rule 7)
        progress(0.0, "opening")
        checkpoint = open_checkpoint(spec.source, self._cache_dir)
        if checkpoint.shape.encoder:
            return load_encoder(command, spec, checkpoint, self._cache_dir, arena, progress)
        precision = precision_of(checkpoint.precision if spec.precision == "auto" else spec.precision)
        with torch.no_grad():
            stage = build_stage(checkpoint.config, comm.stage, comm.stages, precision.compute)
            plan = ParallelPlan(stage, comm.tensor_rank, comm.tensor_size)
            source = weight_source(
                checkpoint,
                stage.base_prefix,
                self._cache_dir,
                lambda done, what, note="": progress(_CONVERTING * done, what, note),
            )
            with ExitStack() as undo:
                weights, workspace, kv = self._reserve(command, spec, checkpoint, stage, plan, precision, arena, undo)

                def loaded(fraction: float) -> None:
                    progress(_CONVERTING + (1 - _CONVERTING) * fraction, "loading weights")

                StageFiller(stage, plan, source, precision, weights, comm, loaded).fill()
                fuse_blocks(stage)
                kv.grow(command.kv_floor_blocks)
                undo.pop_all()
        holder = BatchHolder()
        _connect_attention(stage, holder)
        shorten_lookups(stage.model)
        context = min(spec.context or checkpoint.max_context, checkpoint.max_context)
        facts = ShardFacts(checkpoint.digest, precision.name, context, source.read_bytes)
        compute_threads = ComputeThreads(_sample_matmul(stage, precision.compute))
        constraints = constraints_of(checkpoint, self._cache_dir) if stage.is_last else None
        progress(1.0, "ready")
        return TorchShard(
            command, facts, stage, holder, weights, workspace, kv, comm, precision.compute, compute_threads, constraints
        )

    def _reserve(
        self,
        command: LoadShard,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        stage: StageModel,
        plan: ParallelPlan,
        precision: Precision,
        arena: Arena,
        undo: ExitStack,
    ) -> tuple[TensorRegion, TensorRegion, PagedKv]:
        """Address space for all kinds of memory; what is reserved is closed again when `undo` unwinds."""
        shape = checkpoint.shape
        prefix = f"{command.group_id}:{command.model}"
        elements = sum(parameter.numel() for parameter in stage.model.parameters()) + shape.vocabulary * shape.hidden
        weights = TensorRegion(arena, f"{prefix}:weights", elements * 5, command.budget.get("weights"))
        undo.callback(weights.close)
        size = workspace_bytes(spec, checkpoint, plan.count, precision.compute.itemsize)
        workspace = TensorRegion(arena, f"{prefix}:workspace", size, command.budget.get("workspace"))
        undo.callback(workspace.close)
        workspace.empty(torch.uint8, (size,))
        kv = PagedKv(
            arena,
            f"{prefix}:kv",
            layers=stage.layers,
            heads=local_kv_heads(shape.kv_heads, plan.count),
            head_dim=shape.head_dim,
            block_tokens=command.kv_block_tokens,
            ceiling_blocks=command.kv_ceiling_blocks,
            dtype=precision.compute,
            budget_bytes=None,
        )
        undo.callback(kv.close)
        return weights, workspace, kv


def workspace_bytes(spec: ModelSpec, checkpoint: Checkpoint, tensor_parallel: int, item_bytes: int) -> int:
    """Activations of the largest step, which torch takes from the process's heap: accounted, so that the ledger knows them."""
    shape, limits = checkpoint.shape, spec.limits
    widest = max(2 * shape.intermediate, (shape.heads + 2 * shape.kv_heads) * shape.head_dim) // tensor_parallel
    per_token = (4 * shape.hidden + 2 * widest) * item_bytes
    logits = limits.concurrency * shape.vocabulary * (item_bytes + 4)
    return limits.batch_tokens * per_token + logits


def _connect_attention(stage: StageModel, holder: BatchHolder) -> None:
    for layer, module in enumerate(getattr(stage.base, stage.names.layers)):
        for part in module.modules():
            if hasattr(part, "layer_idx") and hasattr(part, "head_dim"):
                part.paged = LayerAttention(layer, holder)


def _sample_matmul(stage: StageModel, dtype: torch.dtype) -> Callable[[], object]:
    """The widest product of the first layer, for a few sequences' tokens."""
    layer = getattr(stage.base, stage.names.layers)[0]
    linears = [module for module in layer.modules() if isinstance(module, (DenseLinear, Int4Linear, Int8Linear))]
    widest = max(linears, key=lambda linear: linear.outputs * linear.inputs)
    x = torch.ones(_SAMPLE_TOKENS, widest.inputs, dtype=dtype)
    return lambda: widest(x)
