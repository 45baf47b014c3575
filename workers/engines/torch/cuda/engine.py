"""The built-in engine on one GPU: loading a shard of a model."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

import torch

from gateway.api.checkpoint import Checkpoint, open_checkpoint
from gateway.api.config import ModelSpec
from gateway.api.errors import invalid
from workers.comm.base import GroupComm
from workers.engines.base import ProgressFn
from workers.engines.torch.constraint import constraints_of
from workers.engines.torch.cuda import flash
from workers.engines.torch.cuda.attention import Attention, GatheringAttention
from workers.engines.torch.cuda.attention_check import flash_works
from workers.engines.torch.cuda.fill import GpuFiller, gpu_precision
from workers.engines.torch.cuda.kv import BlockMajorKv
from workers.engines.torch.cuda.residency import FixedMemory, ParkedMemory, ParkingSpace
from workers.engines.torch.cuda.sequences import SequenceTable
from workers.engines.torch.cuda.shard import GpuShard
from workers.engines.torch.cuda.stack import build_stack
from workers.engines.torch.cuda.steps import EagerSteps, GraphSteps, Network, batch_sizes
from workers.engines.torch.fill import Precision
from workers.engines.torch.memory import TensorRegion
from workers.engines.torch.parallel import ParallelPlan
from workers.engines.torch.shard import ShardFacts
from workers.engines.torch.source import weight_source
from workers.engines.torch.stage import StageModel, build_stage
from workers.memory.arena import Arena
from workers.memory.cuda_arena import CudaRegion
from workers.messages import LoadShard

log = logging.getLogger(__name__)

_LOADED = 0.9  # share of the progress bar; then graphs
SPARE_PLACES = 8  # sequences that have ended but are released with the next step


class GpuEngine:
    def __init__(self, cache_dir: Path, device: torch.device, parking: ParkingSpace | None = None) -> None:
        """`cache_dir` keeps converted weights, by digest. With a parking space, models can be parked. One a GPU and process.

        `device` cpu computes the same way without graphs and library kernels: what tests without a GPU run.
        """
        self._cache_dir = cache_dir
        self._device = device
        self._parking = parking
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._graph_pool = torch.cuda.graph_pool_handle() if on_gpu else None

    def load(self, command: LoadShard, rank: int, arena: Arena, comm: GroupComm, progress: ProgressFn) -> GpuShard:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread
        spec = ModelSpec.model_validate_json(command.spec_json)
        progress(0.0, "opening")
        checkpoint = open_checkpoint(spec.source, self._cache_dir)
        if checkpoint.shape.encoder:
            raise invalid(
                f"model `{command.model}` makes embeddings, which pools of CPU ranks compute; name one in its pools", "pools"
            )
        stored = checkpoint.precision
        precision = gpu_precision(stored if spec.precision == "auto" else spec.precision, stored)

        def loading(fraction: float, what: str, note: str = "") -> None:
            progress(_LOADED * fraction, what, note)

        with ExitStack() as undo:
            shard = self._load(command, spec, checkpoint, precision, arena, comm, loading, undo)
            undo.pop_all()
        progress(1.0, "ready")
        return shard

    def _load(
        self,
        command: LoadShard,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        precision: Precision,
        arena: Arena,
        comm: GroupComm,
        progress: ProgressFn,
        undo: ExitStack,
    ) -> GpuShard:
        device = self._device
        outside_before = _taken_outside(arena)
        with torch.no_grad():
            stage = build_stage(checkpoint.config, comm.stage, comm.stages, precision.compute)
            plan = ParallelPlan(stage, comm.tensor_rank, comm.tensor_size)
            source = weight_source(checkpoint, stage.base_prefix, self._cache_dir, progress)
            weights, workspace, kv = self._reserve(command, checkpoint, stage, plan, precision, arena, undo)
            filler = GpuFiller(
                stage, plan, source, precision, memory=weights, comm=comm, progress=lambda done: progress(done, "loading weights")
            )
            filler.fill()
            _move_buffers(stage, device)
            kv.grow(max(command.kv_floor_blocks, 1))
        heads = checkpoint.shape.heads // plan.count
        attention = self._attention(kv, heads, precision.compute, workspace)
        stack = build_stack(stage, kv, attention)
        network = Network(stage, stack, comm, precision.compute, device)
        places = spec.limits.concurrency + SPARE_PLACES
        newest = torch.zeros(places + 1, dtype=torch.int32, device=device)
        eager = EagerSteps(network, attention, newest, command.kv_block_tokens, device)
        context = min(spec.context or checkpoint.max_context, checkpoint.max_context)
        graphs = None
        if isinstance(attention, flash.FlashAttention):
            attention.expect(stack.rules)
            if comm.stages == 1:
                progress(1.0, "recording decode steps")
                graphs = self._record(network, attention, newest, command.kv_block_tokens, context, spec, undo)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        kv.grow(command.kv_floor_blocks)
        if self._parking is not None and isinstance(weights.region, CudaRegion):
            memory: FixedMemory = ParkedMemory(weights, workspace, kv, filler.layer_ends, self._parking)
        else:
            memory = FixedMemory(weights, workspace, kv)
        facts = ShardFacts(checkpoint.digest, precision.name, context, source.read_bytes)
        constraints = constraints_of(checkpoint, self._cache_dir) if stage.is_last else None
        sequences = SequenceTable(places, checkpoint.shape.vocabulary, device, constraints)
        extra = max(0, _taken_outside(arena) - outside_before)
        return GpuShard(command, facts, stage, memory, comm, sequences, newest, eager, graphs, self._stream, extra, constraints)

    def _reserve(
        self,
        command: LoadShard,
        checkpoint: Checkpoint,
        stage: StageModel,
        plan: ParallelPlan,
        precision: Precision,
        arena: Arena,
        undo: ExitStack,
    ) -> tuple[TensorRegion, TensorRegion, BlockMajorKv]:
        """Address space for all kinds of memory; what is reserved is closed again when `undo` unwinds."""
        shape = checkpoint.shape
        prefix = f"{command.group_id}:{command.model}"
        elements = sum(parameter.numel() for parameter in stage.model.parameters()) + shape.vocabulary * shape.hidden
        weights = TensorRegion(arena, f"{prefix}:weights", elements * 5, command.budget.get("weights"))
        undo.callback(weights.close)
        workspace = TensorRegion(arena, f"{prefix}:workspace", 2 * flash.FLOAT_WORKSPACE_BYTES, command.budget.get("workspace"))
        undo.callback(workspace.close)
        kv = BlockMajorKv(
            arena,
            f"{prefix}:kv",
            layers=stage.layers,
            heads=max(1, shape.kv_heads // plan.count),
            head_dim=shape.head_dim,
            block_tokens=command.kv_block_tokens,
            ceiling_blocks=command.kv_ceiling_blocks,
            dtype=precision.compute,
        )
        undo.callback(kv.close)
        return weights, workspace, kv

    def _attention(self, kv: BlockMajorKv, heads: int, dtype: torch.dtype, workspace: TensorRegion) -> Attention:
        if self._device.type != "cuda" or not flash_works(self._device, dtype, kv.head_dim, heads // kv.heads):
            return GatheringAttention(kv)
        floats = workspace.empty(torch.uint8, (flash.FLOAT_WORKSPACE_BYTES,))
        plans = workspace.empty(torch.uint8, (flash.PLANS_PER_STEP, flash.PLAN_BYTES))
        return flash.FlashAttention(kv, heads, dtype, flash.Workspace(floats, plans))

    def _record(
        self,
        network: Network,
        attention: flash.FlashAttention,
        newest: torch.Tensor,
        block_tokens: int,
        context: int,
        spec: ModelSpec,
        undo: ExitStack,
    ) -> GraphSteps | None:
        """Decode graphs, recorded beside other models' steps. None where a family's forward pass cannot be recorded."""
        assert self._graph_pool is not None
        sizes = batch_sizes(spec.limits.concurrency)
        graphs = GraphSteps(network, attention, newest, block_tokens, -(-context // block_tokens), sizes, self._device)
        undo.callback(graphs.close)
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(self._device)):
            try:
                graphs.capture(self._graph_pool)
            except (RuntimeError, NotImplementedError) as error:
                log.warning("decode steps of %s run without CUDA graphs: %s", spec.source, error)
                graphs.close()
                return None
        return graphs


def _move_buffers(stage: StageModel, device: torch.device) -> None:
    for module in stage.model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def _taken_outside(arena: Arena) -> int:
    """Bytes that torch's allocator and the driver hold beside the arena's pages: graphs, handles, kept activations."""
    report = getattr(arena, "report", None)
    if report is None:
        return 0
    found = report()
    return found.torch_bytes + found.other_bytes
